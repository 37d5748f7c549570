"""What the protocol's answers look like: whole ones, and the pieces of a stream."""

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from latte.data.tokenizer import Tokenizer
from latte.serve.engine import Ended, Token
from latte.serve.protocol import Asked
from latte.serve.text import TextStream


@dataclass
class Choice:
    """One continuation in the making.

    text: all that was given out. tokens: how many were drawn. finish: why it ended, None before.
    logprobs: the protocol's records of tokens since the last `take`.
    """

    index: int
    asked: Asked
    tokenizer: Tokenizer
    text: str = ""
    tokens: int = 0
    finish: str | None = None
    _fresh: str = ""
    _offset: int = 0
    _records: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stream = TextStream(self.asked.stops)

    def hear(self, event: Token | Ended) -> None:
        """Takes what the engine tells."""
        if isinstance(event, Ended):
            piece = self._stream.push(b"", final=True)
            self.finish = "stop" if piece.stopped else event.reason
        else:
            self.tokens += 1
            if self.asked.alternatives is not None:
                self._records.append(self._record(event))
            piece = self._stream.push(self.tokenizer.decode_bytes([event.id]))
            self.finish = "stop" if piece.stopped else None
        self._fresh += piece.text
        self.text += piece.text

    def take(self) -> tuple[str, list[dict[str, Any]]]:
        """Text and records since the last call."""
        fresh, records, self._fresh, self._records = self._fresh, self._records, "", []
        return fresh, records

    def _record(self, token: Token) -> dict[str, Any]:
        written = self._written(token.id, token.logprob)
        others = [self._written(*pair) for pair in token.likeliest]
        record = {**written, "top_logprobs": others, "offset": self._offset}
        self._offset += len(written["token"])
        return record

    def _written(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.tokenizer.decode_bytes([token])
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


class Answer:
    """The answer to one request: its name, its choices and what they cost."""

    def __init__(self, asked: Asked, tokenizer: Tokenizer, model: str):
        self.asked, self._model, self._created = asked, model, int(time.time())
        prefix = "cmpl" if asked.kind == "completion" else "chatcmpl"
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        count = len(asked.prompts) * asked.choices
        self.choices = [Choice(i, asked, tokenizer) for i in range(count)]

    def whole(self) -> dict[str, Any]:
        """The answer, once all choices have ended."""
        parts = [self._choice(choice, *choice.take(), whole=True) for choice in self.choices]
        kind = "text_completion" if self.asked.kind == "completion" else "chat.completion"
        return {**self._head(kind), "choices": parts, "usage": self.usage()}

    def piece(self, choice: Choice) -> dict[str, Any] | None:
        """What is new of a choice; None for nothing."""
        text, records = choice.take()
        if not text and not records and choice.finish is None:
            return None
        part = self._choice(choice, text, records, whole=False)
        return {**self._head(self._chunk), "choices": [part]}

    def last(self) -> dict[str, Any]:
        """The piece that says what a stream cost."""
        return {**self._head(self._chunk), "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Tokens read and drawn; a prompt counts once however many choices it has."""
        read = sum(map(len, self.asked.prompts))
        drawn = sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": read,
            "completion_tokens": drawn,
            "total_tokens": read + drawn,
        }

    @property
    def _chunk(self) -> str:
        return "text_completion" if self.asked.kind == "completion" else "chat.completion.chunk"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _choice(
        self, choice: Choice, text: str, records: list[dict[str, Any]], *, whole: bool
    ) -> dict[str, Any]:
        shared = {"index": choice.index, "finish_reason": choice.finish}
        if self.asked.kind == "completion":
            logprobs = None if self.asked.alternatives is None else _of_completion(records)
            return {**shared, "text": text, "logprobs": logprobs}
        logprobs = None
        if self.asked.alternatives is not None:
            logprobs = {"content": [_without_offset(record) for record in records], "refusal": None}
        message = {"role": "assistant", "content": text}
        return {**shared, "message" if whole else "delta": message, "logprobs": logprobs}


def _of_completion(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Records as the completions protocol lists them."""
    return {
        "tokens": [record["token"] for record in records],
        "token_logprobs": [record["logprob"] for record in records],
        "top_logprobs": [
            {other["token"]: other["logprob"] for other in record["top_logprobs"]}
            for record in records
        ],
        "text_offset": [record["offset"] for record in records],
    }


def _without_offset(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "offset"}
