"""One shard of a store: the tokens of one input, a range a subset at a time, and its documents.

tokens/      uint16 (or uint32), zarr3: every document as separator, t1, …, tn
documents/   int64 [documents, 3], zarr3: where each document ends in `tokens`, its bytes of text,
             and its line in the input (of texts: the number of the file in the shard)
rows.npy     int32 [windows, lengths]: rows of best-fit packing, of every window of documents
hashes.bin   of held-out documents: 8 bytes of SHA-256 each; only where whole files are held out
shard.json   what is above, and the checksums; written last
"""

import hashlib
import io
import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts
from jaxtyping import Int32

from latte.data.packing import LENGTHS, WINDOW, count_rows
from latte.data.place import Place
from latte.data.tokenizer import Tokenizer

NAME = "shard.json"
SHARD = 1 << 24
"""Tokens of a file of `tokens`: 32 MB of uint16. So many are held before they are written."""
CHUNK = 1 << 13
"""Tokens of a chunk, the least that is read: a few rows, so that random rows cost little."""
_DOCUMENTS = 1 << 18, 1 << 12
"""Documents of a file, and of a chunk, of `documents`."""


class Range(NamedTuple):
    """Documents of one subset and split that lie together in a shard.

    start, stop: in `tokens`. first, documents: in `documents`. bytes: of text.
    """

    split: str
    subset: str
    start: int
    stop: int
    first: int
    documents: int
    bytes: int


@dataclass(frozen=True)
class SourceRecord:
    """An input file: its bytes as they are stored, and how many bytes of text are held out."""

    name: str
    bytes: int
    sha256: str
    heldout_bytes: int


@dataclass(frozen=True)
class FileRecord:
    """A file of a store."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardRecord:
    """What a shard holds.

    bad: what was left out as bad: where it is (file, or file:line), and why.
    copies: documents that were left out because they are held-out ones.
    files: every file of the shard but this record.
    """

    sources: list[SourceRecord]
    ranges: list[Range]
    bad: list[tuple[str, str]]
    copies: int
    files: dict[str, FileRecord]

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"ranges": self.ranges}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> "ShardRecord":
        content = json.loads(text)
        return cls(
            [SourceRecord(**source) for source in content["sources"]],
            [Range(*values) for values in content["ranges"]],
            [(where, why) for where, why in content["bad"]],
            content["copies"],
            {name: FileRecord(**record) for name, record in content["files"].items()},
        )


def windows_of(documents: int) -> int:
    """Windows of a range of so many documents."""
    return -(-documents // WINDOW)


class ShardWriter:
    """Writes a shard into a folder of this machine, with memory that its size does not change."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        self._folder = folder
        dtype = token_type(tokenizer.vocab_size)
        self._separator = np.asarray([tokenizer.separator], dtype)
        self._tokens = _Growing(folder / "tokens", tokens_spec(dtype), SHARD)
        self._documents = _Growing(folder / "documents", documents_spec(), _DOCUMENTS[0])
        self._held: dict[tuple[str, str], list[tuple[np.ndarray, int, int]]] = defaultdict(list)
        self._length = 0
        self._ranges: list[Range] = []

    def add(
        self, split: str, subset: str, ids: Int32[np.ndarray, " n"], size: int, line: int
    ) -> None:
        """Adds a document of `size` bytes of text, from a line of the input."""
        ids = np.concatenate([self._separator, ids.astype(self._separator.dtype)])
        self._held[split, subset].append((ids, size, line))
        self._length += len(ids)
        if self._length >= SHARD:
            self._flush()

    def close(self) -> list[Range]:
        """Writes what is held, and returns what lies where."""
        self._flush()
        self._tokens.close()
        self._documents.close()
        rows = [self._rows(r) for r in self._ranges]
        counts = np.concatenate(rows) if rows else np.empty((0, len(LENGTHS)), np.int32)
        (self._folder / "rows.npy").write_bytes(npy(counts))
        return self._ranges

    def _flush(self) -> None:
        for (split, subset), documents in sorted(self._held.items()):
            start, first = self._tokens.length, self._documents.length
            ids, sizes, lines = zip(*documents, strict=True)
            ends = start + np.cumsum([len(part) for part in ids])
            self._documents.append(np.stack([ends, sizes, lines], axis=1).astype(np.int64))
            self._tokens.append(np.concatenate(ids))
            new = Range(split, subset, start, int(ends[-1]), first, len(ids), sum(sizes))
            last = self._ranges[-1] if self._ranges else None
            if last and last[:2] == new[:2]:
                self._ranges[-1] = Range(
                    *new[:2],
                    last.start,
                    new.stop,
                    last.first,
                    last.documents + new.documents,
                    last.bytes + new.bytes,
                )
            else:
                self._ranges.append(new)
        self._held.clear()
        self._length = 0

    def _rows(self, r: Range) -> np.ndarray:
        """Rows of every window of a range, at every length."""
        rows, start = [], r.start
        for at in range(0, r.documents, WINDOW):
            some = min(WINDOW, r.documents - at)
            ends = self._documents.read(r.first + at, r.first + at + some)[:, 0]
            lengths = np.diff(ends, prepend=start)
            rows.append([count_rows(lengths, T) for T in LENGTHS])
            start = int(ends[-1])
        return np.asarray(rows, np.int32)


class _Growing:
    """An array that is appended to; only whole files of `shard` rows are written before the end."""

    def __init__(self, folder: Path, spec: dict[str, Any], shard: int):
        self._array = ts.open({**spec, "kvstore": Place(str(folder)).spec()}, create=True).result()
        self._shard = shard
        self._pending: list[np.ndarray] = []
        self._written = 0
        self.length = 0

    def append(self, values: np.ndarray) -> None:
        self._pending.append(values)
        self.length += len(values)
        whole = (self.length - self._written) // self._shard * self._shard
        if whole:
            self._write(whole)

    def close(self) -> None:
        self._write(self.length - self._written)

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.asarray(self._array[start:stop].read().result())

    def _write(self, count: int) -> None:
        if not count:
            return
        values = np.concatenate(self._pending)
        end = self._written + count
        self._array = self._array.resize(exclusive_max=[end, *values.shape[1:]]).result()
        self._array[self._written : end].write(values[:count]).result()
        # A copy, so that what was written can be freed.
        self._pending = [values[count:].copy()]
        self._written = end


def token_type(vocab_size: int) -> str:
    """The type of tokens, in which every id has room."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def tokens_spec(dtype: str, length: int = 0) -> dict[str, Any]:
    """The array of tokens. No compression: a row is read in microseconds as it is."""
    return _spec(dtype, [length], [SHARD], [CHUNK], [])


def documents_spec(length: int = 0) -> dict[str, Any]:
    """The array of documents."""
    zstd = {"name": "zstd", "configuration": {"level": 3}}
    shard, chunk = _DOCUMENTS
    return _spec("int64", [length, 3], [shard, 3], [chunk, 3], [zstd])


def _spec(dtype: str, shape: list, shard: list, chunk: list, compression: list) -> dict[str, Any]:
    little_endian = {"name": "bytes", "configuration": {"endian": "little"}}
    sharding = {
        "chunk_shape": chunk,
        "codecs": [little_endian, *compression, {"name": "crc32c"}],
        "index_codecs": [little_endian, {"name": "crc32c"}],
    }
    metadata = {
        "shape": shape,
        "data_type": dtype,
        "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    # What is missing is an error, and not so many zeros.
    strict = {"fill_missing_data_reads": False, "store_data_equal_to_fill_value": True}
    return {"driver": "zarr3", "metadata": metadata, **strict}


def npy(array: np.ndarray) -> bytes:
    """The content of an .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def record_files(folder: Path) -> dict[str, FileRecord]:
    """The sizes and checksums of all files of a folder."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {
        file.relative_to(folder).as_posix(): FileRecord(file.stat().st_size, _sha256(file))
        for file in files
    }


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
