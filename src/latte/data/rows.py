"""The rows of a subset, for each of its epochs in another order: how they are cut or packed.

Both ways follow from the seed and the epoch alone. cut: a stream is a ring, whose last token is
followed by its first one, a separator. Each epoch cuts it at another place into as many rows of T
tokens as fit (fewer than T tokens are left over). fit: rows of best-fit packing, see
`latte.data.packing`; an epoch has every document once.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import grain.experimental
import numpy as np

from latte.data.batch import Batch, cut_batch
from latte.data.manifest import read_rows
from latte.data.mixture import Place
from latte.data.packing import LENGTHS, WINDOW, Packing, count_rows, pack
from latte.data.shard import windows_of
from latte.data.store import TokenStore, TokenStream, finish
from latte.errors import UserError

_ROUNDS = 4
"""Rounds of the cipher that permutes rows."""
_PACKED = 1024
"""Windows whose packing is kept."""
_COUNTED = 2_000_000
"""Documents of a store whose rows are counted when it is opened, if they were not before."""


class Piece(NamedTuple):
    """Tokens of a row: `length` from `start` in the stream of a subset, by its number."""

    subset: int
    start: int
    length: int


class Rows(ABC):
    """The rows of all subsets of a split of a store."""

    def __init__(self, store: TokenStore, streams: Sequence[TokenStream], T: int, seed: int):
        self.streams, self.T, self.seed = streams, T, seed
        self.separator = store.tokenizer.separator
        self.per_epoch = [self._count(i) for i in range(len(streams))]
        """Rows of an epoch of each subset."""

    @abstractmethod
    def read(self, places: Sequence[Place]) -> Batch:
        """The rows at some places, as a batch."""

    @abstractmethod
    def pieces(self, place: Place) -> list[Piece]:
        """What a row is made of, in its order."""

    @abstractmethod
    def _count(self, subset: int) -> int:
        """Rows of an epoch of a subset."""

    def _shuffled(self, place: Place) -> tuple[int, int]:
        """Which row of the subset this is, and where the ring is cut, in 1/2³² of it."""
        rows = self.per_epoch[place.subset]
        epoch, index = divmod(place.nth, rows)
        cut, key = _draw(self.seed, epoch)
        return grain.experimental.index_shuffle(index, rows - 1, key, _ROUNDS), cut


class CutRows(Rows):
    """Documents joined and cut."""

    def read(self, places: Sequence[Place]) -> Batch:
        rows = np.empty((len(places), self.T + 1), np.int32)
        reads: list = []
        for row, place in zip(rows, places, strict=True):
            self.streams[place.subset].begin(row, self.start(place), reads)
        finish(self.streams[0].shards, reads)
        return cut_batch(rows, self.separator)

    def pieces(self, place: Place) -> list[Piece]:
        start, tokens = self.start(place), len(self.streams[place.subset])
        first = min(self.T, tokens - start)
        rest = [Piece(place.subset, 0, self.T - first)] if first < self.T else []
        return [Piece(place.subset, start, first), *rest]

    def start(self, place: Place) -> int:
        """Where a row begins in the stream of its subset."""
        shuffled, cut = self._shuffled(place)
        tokens = len(self.streams[place.subset])
        return (cut * tokens // (1 << 32) + shuffled * self.T) % tokens

    def _count(self, subset: int) -> int:
        return len(self.streams[subset]) // self.T


class Part(NamedTuple):
    """A piece of a packed row, and whether its document ends with it."""

    start: int
    length: int
    ends: bool


class FitRows(Rows):
    """Documents packed whole."""

    def __init__(self, store: TokenStore, streams: Sequence[TokenStream], T: int, seed: int):
        self._before: list[np.ndarray] = []  # of each subset: rows before each window, and in all
        self._counted = read_rows(store.place, store.manifest, T) if T in LENGTHS else None
        super().__init__(store, streams, T, seed)
        self._pack = functools.lru_cache(_PACKED)(self._pack_window)

    def read(self, places: Sequence[Place]) -> Batch:
        shape = len(places), self.T
        tokens, targets = np.full((2, *shape), self.separator, np.int32)
        segments, weights = np.empty(shape, np.int32), np.zeros(shape, np.float32)
        reads: list = []
        for r, place in enumerate(places):
            stream, parts, at = self.streams[place.subset], self._parts(place), 0
            for n, part in enumerate(parts, 1):
                stop = at + part.length
                stream.begin(tokens[r, at:stop], part.start, reads)
                segments[r, at:stop] = n
                if not part.ends:  # the document goes on in another row
                    stream.begin(targets[r, stop - 1 : stop], part.start + part.length, reads)
                at = stop
            weights[r, :at] = 1
            # Padding is separators, each in a segment of its own: nothing sees it.
            segments[r, at:] = len(parts) + 1 + np.arange(self.T - at)
        finish(self.streams[0].shards, reads)
        same = segments[:, 1:] == segments[:, :-1]
        targets[:, :-1][same] = tokens[:, 1:][same]
        return Batch(tokens, targets, segments, weights)

    def pieces(self, place: Place) -> list[Piece]:
        return [Piece(place.subset, start, length) for start, length, _ in self._parts(place)]

    def _parts(self, place: Place) -> list[Part]:
        """What a row is made of, in its order."""
        row, _ = self._shuffled(place)
        before = self._before[place.subset]
        window = int(np.searchsorted(before, row, side="right")) - 1
        starts, lengths, packing = self._pack(place.subset, window)
        first, stop = np.searchsorted(packing.row, [row - before[window], row - before[window] + 1])
        return [
            Part(
                int(starts[document] + start),
                int(length),
                bool(start + length == lengths[document]),
            )
            for document, start, length in zip(
                packing.document[first:stop],
                packing.start[first:stop],
                packing.length[first:stop],
                strict=True,
            )
        ]

    def _pack_window(self, subset: int, window: int) -> tuple[np.ndarray, np.ndarray, Packing]:
        """Where the documents of a window begin in the stream, their lengths, and their rows."""
        stream = self.streams[subset]
        first = stream.index.window - stream.index.window[0]
        i = int(np.searchsorted(first, window, side="right")) - 1
        starts, lengths = _documents(stream, i, window - int(first[i]))
        return starts, lengths, pack(lengths, self.T)

    def _count(self, subset: int) -> int:
        stream = self.streams[subset]
        if self._counted is not None:
            index = stream.index
            stop = index.window[-1] + windows_of(int(index.documents[-1]))
            rows = self._counted[index.window[0] : stop]
        else:
            rows = self._count_now(stream)
        self._before.append(np.concatenate([[0], np.cumsum(rows, dtype=np.int64)]))
        return int(self._before[-1][-1])

    def _count_now(self, stream: TokenStream) -> np.ndarray:
        documents = int(stream.index.documents.sum())
        if documents > _COUNTED:
            raise UserError(
                f"rows of {self.T} tokens were not counted when {documents:,} documents were "
                f"prepared: take train.sequence_length {', '.join(map(str, LENGTHS))}, or "
                "data.packing cut"
            )
        counts = [
            count_rows(_documents(stream, i, window)[1], self.T)
            for i, some in enumerate(stream.index.documents.tolist())
            for window in range(windows_of(some))
        ]
        return np.asarray(counts, np.int64)


def _documents(stream: TokenStream, i: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the documents of a window of range i begin in the stream, and their tokens."""
    first = window * WINDOW
    stop = min(first + WINDOW, int(stream.index.documents[i]))
    ends = stream.documents_of(i, max(first - 1, 0), stop)[:, 0]
    before = [stream.index.start[i]] if first == 0 else []
    edges = np.concatenate([before, ends]).astype(np.int64)
    return edges[:-1] + int(stream.ends[i] - stream.index.stop[i]), np.diff(edges)


@functools.lru_cache(maxsize=64)
def _draw(seed: int, epoch: int) -> tuple[int, int]:
    """Two random numbers of 32 bits: where an epoch cuts the ring, and the key of its order."""
    cut, key = np.random.SeedSequence([seed, epoch]).generate_state(2, np.uint32).tolist()
    return cut, key
