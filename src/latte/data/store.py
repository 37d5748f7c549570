"""The token store: documents as token streams in sharded zarr3, with a manifest.

manifest.json, index.npy, rows/, shards.jsonl    see `latte.data.manifest`
tokenizer.model, .json, or .txt for bytes
shards/NNNNN/                                    see `latte.data.shard`

A subset of a split is a stream: the documents of that subset in all shards, one after the other.
"""

import functools
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import tensorstore as ts
from jaxtyping import Int32, Int64

from latte.data.manifest import (
    SPLITS,
    Index,
    Manifest,
    mend,
    read_index,
    read_manifest,
    read_records,
    shard_name,
)
from latte.data.place import Place
from latte.data.records import is_records
from latte.data.shard import ShardRecord, documents_spec, token_type, tokens_spec
from latte.data.tokenizer import Tokenizer, read_tokenizer
from latte.data.verify import verify
from latte.errors import UserError

_CACHE = 128 << 20
"""Bytes of chunks kept in memory."""
_OPEN = 1024
"""Shards that are kept open."""
_CHECKED = 1 << 30
"""Bytes of a store on this machine that is checked whole each time that it is opened."""


class Shards:
    """The arrays of a store's shards, opened when they are first read."""

    def __init__(self, place: Place, dtype: str):
        self._place, self._dtype = place, dtype
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE}})
        self._open: OrderedDict[tuple[str, int], ts.TensorStore] = OrderedDict()
        self._lock = threading.Lock()

    def tokens(self, number: int) -> ts.TensorStore:
        return self._array("tokens", number)

    def documents(self, number: int) -> ts.TensorStore:
        return self._array("documents", number)

    def error(self, number: int, error: Exception) -> UserError:
        """What to say when a shard cannot be read."""
        words = " ".join(str(error).split())[:300]
        return UserError(
            f"shard {self._place}/{shard_name(number)} cannot be read ({words}): "
            f"{mend(self._place)}, or see `latte data verify {self._place}`"
        )

    def _array(self, name: str, number: int) -> ts.TensorStore:
        with self._lock:
            if (name, number) in self._open:
                self._open.move_to_end((name, number))
                return self._open[name, number]
        # A shard is never longer than this, and where it ends the index knows: that spares a read.
        length = 1 << 40
        spec = tokens_spec(self._dtype, length) if name == "tokens" else documents_spec(length)
        array = ts.open(
            {**spec, "kvstore": self._place.spec(f"{shard_name(number)}/{name}")},
            context=self._context,
            open=True,
            read=True,
            assume_metadata=True,
            recheck_cached_data=False,
        ).result()
        with self._lock:
            self._open[name, number] = array
            while len(self._open) > _OPEN:
                self._open.popitem(last=False)
        return array


@dataclass(frozen=True)
class TokenStream:
    """One subset of one split of a store."""

    subset: str
    shards: Shards
    index: Index

    def __len__(self) -> int:
        """Number of tokens, separators included."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @cached_property
    def ends(self) -> Int64[np.ndarray, " ranges"]:
        """Where each range ends in the stream."""
        return np.cumsum(self.index.stop - self.index.start)

    @cached_property
    def documents(self) -> Int64[np.ndarray, "documents 3"]:
        """Where each document begins in the stream, its bytes of text, and its line in its input.

        All are read: this is for held-out documents, and for stores that fit into memory.
        """
        rows = [np.empty((0, 3), np.int64)]
        for i in range(len(self.ends)):
            part = self.documents_of(i, 0, int(self.index.documents[i]))
            before = int(self.ends[i] - self.index.stop[i])
            starts = np.concatenate([self.index.start[i : i + 1], part[:-1, 0]]) + before
            rows.append(np.column_stack([starts, part[:, 1:]]))
        return np.concatenate(rows)

    @property
    def offsets(self) -> Int64[np.ndarray, " documents_plus_1"]:
        """Where each document (its separator) begins, and at last the number of tokens."""
        return np.append(self.documents[:, 0], len(self))

    @property
    def sizes(self) -> Int64[np.ndarray, " documents"]:
        """Bytes of text of each document."""
        return self.documents[:, 1]

    def documents_of(self, i: int, start: int, stop: int) -> Int64[np.ndarray, "n 3"]:
        """Documents `start` to `stop` of range i: where each ends in its shard, bytes, and line."""
        number, first = int(self.index.shard[i]), int(self.index.first[i])
        array = self.shards.documents(number)
        try:
            return np.asarray(array[first + start : first + stop].read().result())
        except ValueError as error:
            raise self.shards.error(number, error) from error

    def read(self, starts: Int64[np.ndarray, " B"], length: int) -> Int32[np.ndarray, "B length"]:
        """Reads `length` tokens from each start; after the stream's end comes its beginning.

        Args:
          starts: positions in [0, len(self)).
          length: at most len(self) + 1.

        Raises:
          UserError: a shard is missing or corrupt.
        """
        rows = np.empty((len(starts), length), np.int32)
        reads = []
        for row, start in zip(rows, starts.tolist(), strict=True):
            self.begin(row, start, reads)
        finish(self.shards, reads)
        return rows

    def begin(self, row: np.ndarray, start: int, reads: list) -> None:
        """Begins to read tokens from `start` into a row; `finish(reads)` waits for them."""
        i = int(np.searchsorted(self.ends, start, side="right"))
        done = 0
        while done < len(row):
            at = int(self.index.stop[i] - self.ends[i]) + start
            count = min(len(row) - done, int(self.index.stop[i]) - at)
            number = int(self.index.shard[i])
            array = self.shards.tokens(number)
            reads.append((number, row[done : done + count], array[at : at + count].read()))
            done += count
            start += count
            i += 1
            if i == len(self.ends):
                i, start = 0, 0


def finish(shards: Shards, reads: list) -> None:
    """Waits for reads of tokens, each (shard, where it goes, future)."""
    for number, part, future in reads:
        try:
            part[:] = future.result()
        except ValueError as error:
            raise shards.error(number, error) from error


@dataclass(frozen=True)
class TokenStore:
    """A corpus as tokens, verified.

    streams: of each (split, subset).
    """

    place: Place
    manifest: Manifest
    tokenizer: Tokenizer
    streams: dict[tuple[str, str], TokenStream] = field(repr=False)

    @classmethod
    def open(cls, where: Path | str, *, fingerprint: str | None = None) -> "TokenStore":
        """Opens a store, in a folder or at a URL, after checking it against its manifest.

        All of it is checked if it is on this machine and not large. Of others the manifest and the
        index are; what is read of the shards is checked as it is read, chunk by chunk.

        Args:
          fingerprint: of the tokenizer that the tokens are meant for; None accepts any.

        Raises:
          UserError: a file is missing or corrupt, or the tokenizer is another one.
        """
        place = Place(str(where))
        manifest = read_manifest(place)
        if fingerprint not in (None, manifest.fingerprint):
            raise UserError(
                f"the tokens in {place} were made by another tokenizer (fingerprint "
                f"{manifest.fingerprint[:12]}, not {fingerprint[:12]}): "
                "prepare the corpus with the tokenizer of this run"
            )
        if place.is_local and manifest.bytes <= _CHECKED:
            verify(place, full=True)
        tokenizer = read_tokenizer(place.read, place)
        if tokenizer.fingerprint != manifest.fingerprint:
            raise UserError(f"the tokenizer in {place} is not the manifest's: {mend(place)}")
        shards = Shards(place, token_type(manifest.vocab_size))
        streams = {
            key: TokenStream(key[1], shards, index)
            for key, index in read_index(place, manifest).items()
        }
        return cls(place, manifest, tokenizer, streams)

    @property
    def subsets(self) -> list[str]:
        """The subsets that are trained on, sorted."""
        return [subset for split, subset in self.streams if split == "train"]

    def split(self, split: str) -> list[TokenStream]:
        """The streams of "train" or "heldout", sorted by subset."""
        assert split in SPLITS
        return [stream for (of, _), stream in self.streams.items() if of == split]

    def is_texts(self, number: int) -> bool:
        """Whether the documents of a shard are whole files."""
        sources = self.records[number].sources
        return len(sources) != 1 or not is_records(sources[0].name)

    @functools.cached_property
    def records(self) -> list[ShardRecord]:
        """Where the shards came from."""
        return read_records(self.place, self.manifest)
