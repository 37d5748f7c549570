"""From drawn tokens to text that is sent on, up to a stop string."""

import codecs
from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Text that is safe to send, and whether a stop string followed it."""

    text: str
    stopped: bool


class TextStream:
    """Bytes in, text out.

    A character is given out once all its bytes are there (bytes that are none become U+FFFD), and
    what may be the beginning of a stop string is held back until it is known not to be.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, more: bytes, *, final: bool = False) -> Piece:
        """Takes bytes; with `final` nothing is held back any more."""
        self._held += self._decoder.decode(more, final)
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            text, self._held = self._held[: min(found)], ""
            return Piece(text, True)
        kept = 0 if final else self._kept()
        cut = len(self._held) - kept
        text, self._held = self._held[:cut], self._held[cut:]
        return Piece(text, False)

    def _kept(self) -> int:
        """Characters at the end that may begin a stop string."""
        sizes = range(1, max(map(len, self._stops), default=0))
        return max(
            (n for n in sizes for stop in self._stops if n < len(stop) and self._ends(stop[:n])),
            default=0,
        )

    def _ends(self, start: str) -> bool:
        return self._held.endswith(start)
