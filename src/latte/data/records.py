"""The documents in a file of records: jsonl (plain, gz, zst) and parquet.

A record is {"text": …, "meta": …}. Its subset is the field of `meta` whose name ends in
`_set_name`, as in SlimPajama and The Pile; `meta` may be an object or a string that holds one.
"""

import gzip
import io
import json
import shutil
import tempfile
import zlib
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import zstandard

from latte.data.fetch import ByteStream, open_bytes
from latte.errors import UserError

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
"""Files that hold a document a record; any other file is a text and one document."""
DEFAULT_SUBSET = "text"
"""The subset of a document that names none."""
LONGEST = 32 << 20
"""Bytes of the longest document of a file of records; it is held in memory whole."""
_BLOCK = 1 << 18
"""Bytes that are read at a time."""
_PACKED = 1 << 14
"""Bytes that are unpacked at a time: of a text that repeats itself much, they are many more."""


class Record(NamedTuple):
    """A document: the text and its subset. Lines (of parquet: rows) count from 1."""

    line: int
    text: str
    subset: str


class Bad(NamedTuple):
    """What is wrong with a line; nothing follows a line at which the file breaks off."""

    line: int
    reason: str


class Read(io.RawIOBase):
    """A file as it is read, which tells of all bytes that pass."""

    def __init__(self, file: ByteStream, note):
        self._file, self._note = file, note

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        self._note(content)
        return len(content)


def is_records(name: str) -> bool:
    """Whether a file of this name holds records."""
    return name.endswith(SUFFIXES)


def read_records(
    path: str, note=lambda content: None, known: Collection[str] = ()
) -> Iterator[Record | Bad]:
    """The documents of a file, one after the other, and what is bad, in its place.

    Args:
      path: of this machine, or a URL.
      note: is given all bytes of the file as they are read.
      known: the names that a subset may have; empty for any.

    Raises:
      UserError: the file cannot be read.
    """
    with open_bytes(path) as file:
        if path.endswith(".parquet"):
            yield from _parquet(file, note, known)
            return
        raw = io.BufferedReader(Read(file, note), _BLOCK)
        unpack = _zstd if path.endswith(".zst") else _gzip if path.endswith(".gz") else _plain
        for line, content in enumerate(_lines(unpack(raw)), 1):
            if isinstance(content, _Broken):
                yield Bad(line, content.reason)
            elif content.strip():
                yield _parse(line, content, known)


class _Broken(NamedTuple):
    reason: str


def _plain(raw: ByteStream) -> Iterator[bytes | _Broken]:
    while block := raw.read(_BLOCK):
        yield block


def _gzip(raw: ByteStream) -> Iterator[bytes | _Broken]:
    try:
        yield from _plain(gzip.GzipFile(fileobj=raw))  # pyright: ignore[reportArgumentType]
    except EOFError:
        yield _Broken("the gzip file is truncated")
    except (gzip.BadGzipFile, zlib.error) as error:
        yield _Broken(f"the gzip file is damaged ({error})")


def _zstd(raw: ByteStream) -> Iterator[bytes | _Broken]:
    """All frames of a file; the reader of the library would take a cut one for whole."""
    # A frame may look back 2 GB at most: what is made for disks asks for far less.
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    while block := raw.read(_PACKED):
        while block:
            frame = frame or decompressor.decompressobj()
            try:
                text = frame.decompress(block)
            except zstandard.ZstdError as error:
                yield _Broken(f"the zst file is damaged ({error})")
                return
            if text:
                yield text
            block = frame.unused_data
            if frame.eof:
                frame = None
    if frame is not None:
        yield _Broken("the zst file is truncated")


def _lines(blocks: Iterator[bytes | _Broken]) -> Iterator[bytes | _Broken]:
    """Cuts blocks into lines, without their ends; of a line that is too long only the start."""
    begun: list[bytes] = []
    length = 0
    for block in blocks:
        if isinstance(block, _Broken):
            # What came before the break in its line is no whole line.
            yield block
            return
        *whole, rest = block.split(b"\n")
        for part in whole:
            yield b"".join([*begun, part])
            begun, length = [], 0
        length += len(rest)
        # One line may be far longer than memory: beyond the limit its start is enough to say so.
        if rest and length <= 8 * LONGEST:
            begun.append(rest)
    if begun:
        yield b"".join(begun)


def _parse(line: int, content: bytes, known: Collection[str]) -> Record | Bad:
    try:
        record = json.loads(content.decode())
    except UnicodeDecodeError as error:
        return Bad(line, f"not UTF-8 at byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        if len(content) > LONGEST:
            return Bad(line, f"longer than {LONGEST >> 20} MB")
        return Bad(line, f"not JSON ({error})")
    if not isinstance(record, dict):
        return Bad(line, "not a JSON object")
    return _check(line, record.get("text"), record.get("meta"), known)


def _check(line: int, text: Any, meta: Any, known: Collection[str]) -> Record | Bad:
    """A record of a text that can be trained on, or what is wrong with it."""
    if text is None:
        return Bad(line, 'no "text"')
    if not isinstance(text, str):
        return Bad(line, '"text" is not a string')
    if not text:
        return Bad(line, 'an empty "text"')
    if len(text) > LONGEST:
        return Bad(line, f"longer than {LONGEST >> 20} MB")
    if "\0" in text:
        return Bad(line, f"a NUL at character {text.index(chr(0))} of the text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Bad(line, f"half of a surrogate pair at character {error.start} of the text")
    subset = _subset(meta)
    if subset is None:
        return Bad(line, '"meta" names no set')
    if known and subset not in known:
        return Bad(line, f"an unknown set name {subset!r}")
    return Record(line, text, subset)


def _subset(meta: Any) -> str | None:
    """The set name in `meta`; None where it is no name."""
    if isinstance(meta, str):
        try:
            meta = json.loads(meta)
        except ValueError:
            return None
    if not isinstance(meta, dict):
        return DEFAULT_SUBSET if meta is None else None
    names = [value for key, value in meta.items() if key.endswith("_set_name")]
    if not names:
        return DEFAULT_SUBSET
    return names[0] if isinstance(names[0], str) and names[0] else None


def _parquet(file: ByteStream, note, known: Collection[str]) -> Iterator[Record | Bad]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("parquet needs pyarrow: pip install 'latte-lm[prepare]'") from error
    with tempfile.TemporaryFile() as copy:
        # Its index is at the end: it is on the disk whole before the first record is read.
        shutil.copyfileobj(io.BufferedReader(Read(file, note), _BLOCK), copy, _BLOCK)
        copy.seek(0)
        try:
            table = pyarrow.parquet.ParquetFile(copy)
            columns = [name for name in ("text", "meta") if name in table.schema_arrow.names]
            line = 0
            for batch in table.iter_batches(batch_size=256, columns=columns):
                for record in batch.to_pylist():
                    line += 1
                    yield _check(line, record.get("text"), record.get("meta"), known)
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            words = " ".join(str(error).split())[:100]
            yield Bad(0, f"the parquet file is damaged or truncated ({words})")
