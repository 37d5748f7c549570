"""The server: routes, streams, and what is refused."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jax
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from latte.config import MeshConfig
from latte.data.tokenizer import Tokenizer
from latte.errors import UserError
from latte.mesh import make_mesh
from latte.run import open_run
from latte.serve.answer import Answer, Choice
from latte.serve.engine import Ended, Engine, FullError, Request, Token
from latte.serve.protocol import Asked, RequestError, parse

_MOST_BYTES = 16_000_000
"""Of a request's body."""


class Service:
    """One model behind the protocol."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, name: str):
        self._engine, self._tokenizer, self._name = engine, tokenizer, name
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ],
            exception_handlers={HTTPException: _refuse_http, RequestError: _refuse},
        )

    async def _health(self, _: HttpRequest) -> Response:
        engine = self._engine
        status = "failed" if engine.failed else "ok"
        body = {"status": status, "in_flight": engine.in_flight, "most": engine.most}
        return JSONResponse(body, status_code=503 if engine.failed else 200)

    async def _models(self, _: HttpRequest) -> Response:
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "latte"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _completions(self, http: HttpRequest) -> Response:
        return await self._answer(http, "completion")

    async def _chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, "chat")

    async def _answer(self, http: HttpRequest, kind: str) -> Response:
        body = await _read_body(http)
        asked = parse(body, kind, self._tokenizer, room=self._engine.room)
        answer = Answer(asked, self._tokenizer, self._name)
        talk = _Talk(answer, self._engine)
        if asked.stream:
            return StreamingResponse(talk.stream(), media_type="text/event-stream")
        while await talk.hear() is not None:
            # A client that has gone asks for nothing more.
            if await http.is_disconnected():
                talk.leave()
                break
        return JSONResponse(answer.whole())


class _Talk:
    """A request and its choices, between the engine's thread and the event loop.

    Raises:
        RequestError: the engine takes no more, or has failed.
    """

    def __init__(self, answer: Answer, engine: Engine):
        self._answer, asked = answer, answer.asked
        self._heard: asyncio.Queue[tuple[Choice, Token | Ended]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._requests = [self._request(asked, choice) for choice in answer.choices]
        self._left = len(self._requests)
        if engine.failed:
            raise RequestError("the server has failed; start it again", status=503)
        try:
            engine.submit(self._requests)
        except FullError:
            raise RequestError(
                f"{engine.in_flight} requests are in flight, of {engine.most} at most; try again "
                "in a moment",
                code="rate_limit_exceeded",
                status=429,
            ) from None

    def _request(self, asked: Asked, choice: Choice) -> Request:
        def tell(event: Token | Ended) -> None:
            self._loop.call_soon_threadsafe(self._heard.put_nowait, (choice, event))

        return Request(
            prompt=asked.prompts[choice.index // asked.choices],
            tokens=asked.tokens,
            sampling=asked.sampling,
            seed=(asked.seed + choice.index) % 2**32,
            tell=tell,
            alternatives=asked.alternatives or 0,
        )

    async def hear(self) -> Choice | None:
        """The next choice that has something new; None once all have ended."""
        while self._left:
            choice, event = await self._heard.get()
            if choice.finish is not None:
                continue  # what was drawn before the engine heard that it was cancelled
            choice.hear(event)
            if isinstance(event, Ended) and event.reason == "error":
                raise RequestError("the server has failed; start it again", status=500)
            if choice.finish is not None:
                self._left -= 1
                self._requests[choice.index].cancelled.set()
            return choice
        return None

    def leave(self) -> None:
        """Ends all that is still drawn."""
        for request in self._requests:
            request.cancelled.set()

    async def stream(self) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        try:
            while (choice := await self.hear()) is not None:
                piece = self._answer.piece(choice)
                if piece is not None:
                    yield _event(piece)
            if self._answer.asked.usage_in_stream:
                yield _event(self._answer.last())
            yield "data: [DONE]\n\n"
        except RequestError as error:
            yield _event(error.body())
        finally:
            self.leave()


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


async def _read_body(http: HttpRequest) -> bytes:
    body = b""
    async for part in http.stream():
        body += part
        if len(body) > _MOST_BYTES:
            raise RequestError(f"the body is longer than {_MOST_BYTES} bytes", status=413)
    return body


async def _refuse(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _refuse_http(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = f"{error.detail}: {http.method} {http.url.path}"
    return JSONResponse(RequestError(words).body(), status_code=error.status_code)


def serve(run_dir: Path, *, host: str, port: int, slots: int, room: int, most: int) -> None:
    """Answers requests for a run's newest checkpoint until it is interrupted.

    Args:
        port: 0 takes a free one.
        slots, room, most: as of `Engine`.

    Raises:
        UserError: the run has no checkpoint, the model has too few positions, or the port is taken.
    """
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        config, tokenizer, model, step = open_run(run_dir)
    if config.model.position == "learned" and room > config.model.max_length:
        raise UserError(
            f"--max-length is {room}, but the model has {config.model.max_length} learned "
            f"positions; take --max-length {config.model.max_length} or less"
        )
    end, vocab = tokenizer.separator, tokenizer.vocab_size
    engine = Engine(model, slots=slots, room=room, most=most, end=end, vocab=vocab)
    service = Service(engine, tokenizer, config.name)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            raise UserError(
                f"{host}:{port} cannot be listened at ({error.strerror}); take another --port"
            ) from None
        listening.listen(2048)
        engine.start()
        port = listening.getsockname()[1]
        print(f"{config.name}, step {step}, at http://{host}:{port}/v1", flush=True)
        settings = uvicorn.Config(service.app, log_level="warning", lifespan="off")
        uvicorn.Server(settings).run(sockets=[listening])
        engine.stop()
