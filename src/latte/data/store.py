"""The token store: documents as token streams in sharded zarr3, with a manifest.

manifest.json
tokenizer.model, or tokenizer.txt for bytes
{train,heldout}/tokens    uint16 (or uint32): every document as separator, t1, …, tn
{train,heldout}/offsets   int64, [documents + 1]: where each document begins, and the end
{train,heldout}/sizes     int64, [documents]: bytes of text of each document
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import tensorstore as ts
from jaxtyping import Int32, Int64

from latte.data.manifest import Count, Manifest, mend, read_manifest, verify_files
from latte.data.tokenizer import Tokenizer, load_tokenizer
from latte.errors import UserError

SPLITS = ("train", "heldout")
_SHARD = 1 << 24
"""Elements of a shard, which is a file: 32 MB of uint16."""
_CHUNK = 1 << 13
"""Elements of a chunk, the least that is read: a few rows, so that random rows cost little."""
_CACHE = 256 << 20
"""Bytes of chunks kept in memory."""


class StreamWriter:
    """Writes one split of a store, a shard at a time."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        """Begins an empty split in a folder that does not exist yet."""
        dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        self._folder = folder
        self._separator = np.asarray([tokenizer.separator], dtype)
        self._tokens = _create(folder / "tokens", dtype)
        self._pending = [self._separator[:0]]
        self._pending_length = 0
        self._written = 0
        self._offsets = [0]
        self._sizes: list[int] = []

    def add(self, ids: Int32[np.ndarray, " n"], size: int) -> None:
        """Appends a document of `size` bytes of text."""
        self._pending += [self._separator, ids.astype(self._separator.dtype)]
        self._pending_length += 1 + len(ids)
        self._offsets.append(self._written + self._pending_length)
        self._sizes.append(size)
        if self._pending_length >= _SHARD:
            self._flush(self._pending_length // _SHARD * _SHARD)

    def close(self) -> Count:
        """Writes what is pending, and returns what the split holds."""
        self._flush(self._pending_length)
        for name, values in (("offsets", self._offsets), ("sizes", self._sizes)):
            _append(_create(self._folder / name, "int64"), 0, np.asarray(values, np.int64))
        return Count(self._written, len(self._sizes), sum(self._sizes))

    def _flush(self, length: int) -> None:
        tokens = np.concatenate(self._pending)
        self._tokens = _append(self._tokens, self._written, tokens[:length])
        self._written += length
        # A copy, so that what was written can be freed.
        self._pending = [tokens[length:].copy()]
        self._pending_length -= length


@dataclass(frozen=True)
class TokenStream:
    """One split of a store.

    offsets: where each document (its separator) begins, and at last the number of tokens.
    sizes: bytes of text of each document.
    """

    tokens: ts.TensorStore
    offsets: Int64[np.ndarray, " documents_plus_1"]
    sizes: Int64[np.ndarray, " documents"]

    def __len__(self) -> int:
        """Number of tokens, separators included."""
        return int(self.offsets[-1])

    def read(self, starts: Int64[np.ndarray, " B"], length: int) -> Int32[np.ndarray, "B length"]:
        """Reads `length` tokens from each start; after the stream's end comes its beginning.

        Args:
          starts: positions in [0, len(self)).
          length: at most len(self) + 1.
        """
        rows = np.empty((len(starts), length), np.int32)
        reads = []
        for row, start in zip(rows, starts.tolist(), strict=True):
            stop = min(start + length, len(self))
            reads.append((row[: stop - start], self.tokens[start:stop].read()))
            if stop - start < length:
                reads.append((row[stop - start :], self.tokens[: length - (stop - start)].read()))
        for part, future in reads:
            part[:] = future.result()
        return rows


@dataclass(frozen=True)
class TokenStore:
    """A corpus as tokens, verified."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer
    train: TokenStream
    heldout: TokenStream

    @classmethod
    def open(cls, folder: Path, *, fingerprint: str | None = None) -> "TokenStore":
        """Opens a store after checking all of it against its manifest.

        Args:
          fingerprint: of the tokenizer that the tokens are meant for; None accepts any.

        Raises:
          UserError: a file is missing or corrupt, or the tokenizer is another one.
        """
        manifest = read_manifest(folder)
        if fingerprint not in (None, manifest.fingerprint):
            raise UserError(
                f"the tokens in {folder} were made by another tokenizer (fingerprint "
                f"{manifest.fingerprint[:12]}, not {fingerprint[:12]}): "
                "prepare the corpus with the tokenizer of this run"
            )
        verify_files(folder, manifest)
        tokenizer = load_tokenizer(folder)
        if tokenizer.fingerprint != manifest.fingerprint:
            raise UserError(f"the tokenizer in {folder} is not the manifest's: {mend(folder)}")
        train, heldout = (_open_stream(folder / split) for split in SPLITS)
        return cls(folder, manifest, tokenizer, train, heldout)

    def stream(self, split: str) -> TokenStream:
        """The stream of "train" or "heldout"."""
        return {"train": self.train, "heldout": self.heldout}[split]


def _create(folder: Path, dtype: str) -> ts.TensorStore:
    """An empty one-dimensional array. No compression: a row is read in microseconds as it is."""
    little_endian = {"name": "bytes", "configuration": {"endian": "little"}}
    sharding = {
        "chunk_shape": [_CHUNK],
        "codecs": [little_endian, {"name": "crc32c"}],
        "index_codecs": [little_endian, {"name": "crc32c"}],
    }
    metadata = {
        "shape": [0],
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [_SHARD]}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    return ts.open({**_spec(folder), "metadata": metadata}, create=True).result()


def _append(array: ts.TensorStore, start: int, values: np.ndarray) -> ts.TensorStore:
    """Writes `values` at `start`, the array's end."""
    longer = array.resize(exclusive_max=[start + len(values)]).result()
    longer[start:].write(values).result()
    return longer


def _open_stream(folder: Path) -> TokenStream:
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE}})
    tokens, offsets, sizes = (
        ts.open(
            _spec(folder / name), context=context, read=True, recheck_cached_data=False
        ).result()
        for name in ("tokens", "offsets", "sizes")
    )
    return TokenStream(
        tokens,
        cast(np.ndarray, offsets.read().result()),
        cast(np.ndarray, sizes.read().result()),
    )


def _spec(folder: Path) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder.resolve()}/"}}
