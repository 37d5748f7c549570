"""The host's half of serving: which request is read, which are drawn from, and who hears of it.

One thread owns the device. In turn it reads one chunk of one waiting prompt and draws one token in
every slot, so that a long prompt delays the others by no more than a chunk. A request tells its
caller of every token by a function of its own, and never waits for the caller.
"""

import collections
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from latte.generate import Sampling
from latte.model import LanguageModel
from latte.serve.slots import Settings, chunks, draw, empty_slots, put, read_chunk

_log = logging.getLogger(__name__)


class Token(NamedTuple):
    """A drawn token, its log-probability, and the likeliest tokens with theirs, best first."""

    id: int
    logprob: float
    likeliest: list[tuple[int, float]]


class Ended(NamedTuple):
    """The last word of a request: "stop" at the end of a document, "length", or "error"."""

    reason: str


@dataclass(eq=False)
class Request:
    """Tokens to go on from, and how.

    tell: hears of every Token, and of one Ended at last; called from the engine's thread.
    alternatives: likeliest tokens to report beside each drawn one.
    """

    prompt: list[int]
    tokens: int
    sampling: Sampling
    seed: int
    tell: Callable[[Token | Ended], None]
    alternatives: int = 0
    drawn: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)


class FullError(Exception):
    """No more requests are taken now."""


class Engine:
    """Requests drawn together.

    Args:
        slots: requests that are drawn from at once; the others wait.
        room: most tokens of a prompt with its continuation.
        most: requests that are drawn from or wait.
        end, vocab: the tokenizer's separator, which ends a request, and its size.
    """

    def __init__(
        self, model: LanguageModel, *, slots: int, room: int, most: int, end: int, vocab: int
    ):
        self.slots, self.room, self.most = slots, room, most
        self.failed = False
        self._model, self._end, self._vocab = model, end, vocab
        self._waiting: collections.deque[Request] = collections.deque()
        self._running: dict[int, Request] = {}
        self._in_flight = 0
        self._wake, self._stopping = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, daemon=True, name="latte-engine")

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; requests in flight hear no more."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def in_flight(self) -> int:
        """Requests that are drawn from or wait."""
        return self._in_flight

    def submit(self, requests: list[Request]) -> None:
        """Takes requests, all or none.

        Raises:
            FullError: there are too many in flight.
        """
        with self._wake:
            if self._in_flight + len(requests) > self.most:
                raise FullError
            self._in_flight += len(requests)
            self._waiting.extend(requests)
            self._wake.notify()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            _log.exception("serving failed")
            with self._wake:
                self.failed = True
                left = [*self._running.values(), *self._waiting]
            for request in left:
                request.tell(Ended("error"))

    def _serve(self) -> None:
        slots = empty_slots(self._model, self.slots, self.room, self._vocab)
        reading: _Reading | None = None
        while True:
            with self._wake:
                while not (self._stopping or self._waiting or self._running or reading):
                    self._wake.wait()
                if self._stopping:
                    return
                self._drop_cancelled()
                if reading is None and self._waiting and len(self._running) < self.slots:
                    reading = _Reading(self._model, self._waiting.popleft(), self.room)
            if reading is not None and reading.step(self._vocab):
                slot = next(i for i in range(self.slots) if i not in self._running)
                slots = put(slots, jnp.asarray(slot), reading.logits, reading.state)
                self._running[slot] = reading.request
                reading = None
            if self._running:
                slots, drawn = draw(self._model, slots, self._settings())
                self._tell(*(np.asarray(x).tolist() for x in drawn))

    def _drop_cancelled(self) -> None:
        for slot, request in list(self._running.items()):
            if request.cancelled.is_set():
                self._leave(slot)
        for request in [r for r in self._waiting if r.cancelled.is_set()]:
            self._waiting.remove(request)
            self._in_flight -= 1

    def _leave(self, slot: int) -> None:
        del self._running[slot]
        self._in_flight -= 1

    def _settings(self) -> Settings:
        count = self.slots
        temperature, top_p = np.zeros(count, np.float32), np.ones(count, np.float32)
        top_k, drawn = np.zeros(count, np.int32), np.zeros(count, np.int32)
        seed = np.zeros(count, np.uint32)
        arrays = temperature, top_k, top_p, seed, drawn
        for slot, request in self._running.items():
            row = (*request.sampling, request.seed, request.drawn)
            for array, value in zip(arrays, row, strict=True):
                array[slot] = value
        return Settings(*map(jnp.asarray, arrays))

    def _tell(self, tokens: list, logprobs: list, likeliest: list, values: list) -> None:
        for slot, request in list(self._running.items()):
            token = tokens[slot]
            request.drawn += 1
            if token == self._end:
                self._end_of(slot, "stop")
                continue
            pairs = list(zip(likeliest[slot], values[slot], strict=True))
            request.tell(Token(token, logprobs[slot], pairs[: request.alternatives]))
            if request.drawn == request.tokens:
                self._end_of(slot, "length")

    def _end_of(self, slot: int, reason: str) -> None:
        request = self._running[slot]
        with self._wake:
            self._leave(slot)
        request.tell(Ended(reason))


class _Reading:
    """A prompt that is being read, chunk by chunk."""

    def __init__(self, model: LanguageModel, request: Request, room: int):
        self.request, self._model = request, model
        self._left, self._sizes = request.prompt, chunks(len(request.prompt))
        self.state: Any = model.backbone.empty_state(1, room)
        self.logits: Any = None

    def step(self, vocab: int) -> bool:
        """Reads a chunk; whether it was the last."""
        size = self._sizes.pop(0)
        part, self._left = self._left[:size], self._left[size:]
        self.logits, self.state = read_chunk(self._model, self.state, part, vocab=vocab)
        return not self._sizes
