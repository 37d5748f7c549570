"""From one input to one shard: read, tokenise, write, commit. A task runs on any machine."""

import hashlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt64

from latte.data.corpus import Source
from latte.data.documents import Document
from latte.data.manifest import shard_name
from latte.data.place import Place
from latte.data.records import DEFAULT_SUBSET, Bad, read_records
from latte.data.shard import NAME, ShardRecord, ShardWriter, SourceRecord, record_files
from latte.data.tokenizer import Tokenizer, read_tokenizer
from latte.errors import UserError

PARTIAL = ".partial-"
"""How folders begin in which shards are made."""
_HASHES = "hashes.bin"
_TEXTS = 64 << 20
"""Bytes of texts that make one input."""


class Part(NamedTuple):
    """A text of an input of texts, and whether it is held out."""

    document: Document
    heldout: bool


class Input(NamedTuple):
    """What becomes one shard: a file of records, or texts that follow each other by name."""

    source: Source | None
    parts: tuple[Part, ...] = ()

    @property
    def name(self) -> str:
        return self.source.name if self.source else self.parts[0].document.source.name

    @property
    def heldout(self) -> bool:
        """Whether it is a file of records that is held out as a whole."""
        return self.source is not None and self.source.heldout


@dataclass(frozen=True)
class Job:
    """All that decides what is in a store's shards, and where they go.

    share: of the documents of records that is held out, by their hash.
    known: names that a subset may have; empty for any.
    skip_bad: documents that may be bad, and are left out.
    """

    place: Place
    tokenizer: Tokenizer
    inputs: tuple[Input, ...]
    share: float
    known: frozenset[str]
    skip_bad: int


class Work(NamedTuple):
    """A job as it is sent to other processes: the tokenizer by its files."""

    place: Place
    tokenizer: dict[str, bytes]
    share: float
    known: frozenset[str]
    skip_bad: int


def unpack(work: Work) -> Job:
    """The job of a process that is sent its inputs one by one."""
    tokenizer = read_tokenizer(work.tokenizer.get, "the job")
    return Job(work.place, tokenizer, (), work.share, work.known, work.skip_bad)


def texts_to_inputs(parts: list[Part]) -> Iterator[Input]:
    """Cuts texts into inputs of about the same size."""
    some: list[Part] = []
    size = 0
    for part in parts:
        some.append(part)
        size += part.document.size
        if size >= _TEXTS:
            yield Input(None, tuple(some))
            some, size = [], 0
    if some:
        yield Input(None, tuple(some))


def read_shard(place: Place, number: int) -> ShardRecord | None:
    """The record of a shard that is there; None for one that is still to be made."""
    text = place.read(f"{shard_name(number)}/{NAME}")
    return None if text is None else ShardRecord.from_json(text)


def read_hashes(place: Place, number: int) -> UInt64[np.ndarray, " n"]:
    """The hashes of the documents of a shard that is held out as a whole."""
    content = place.read(f"{shard_name(number)}/{_HASHES}") or b""
    return np.frombuffer(content, "<u8").astype(np.uint64)


def make_shard(
    job: Job,
    number: int,
    item: Input,
    heldout: UInt64[np.ndarray, " n"],
    progress: Callable[[int], None] = lambda size: None,
) -> ShardRecord:
    """Makes the shard of an input, commits it, and returns its record.

    Args:
      heldout: sorted hashes of documents that must not be trained on.
      progress: is given the bytes of every part of the input once it is read.

    Raises:
      UserError: the input cannot be read, or more of it is bad than may be.
    """
    parent = job.place.folder if job.place.is_local else Path(tempfile.gettempdir())
    folder = parent / f"{PARTIAL}{number:05}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    try:
        writer = _Shard(job, folder, heldout)
        source = writer.read_file(item.source, progress) if item.source else None
        sources = [source] if source else writer.read_texts(item.parts, progress)
        record = writer.close(sources)
        job.place.commit(folder, shard_name(number), NAME)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return record


class _Shard:
    """A shard in the making."""

    def __init__(self, job: Job, folder: Path, heldout: UInt64[np.ndarray, " n"]):
        self._job, self._folder, self._heldout = job, folder, heldout
        self._writer = ShardWriter(folder, job.tokenizer)
        self._bad: list[tuple[str, str]] = []
        self._hashes: list[int] = []
        self._copies = 0

    def read_texts(
        self, parts: tuple[Part, ...], progress: Callable[[int], None]
    ) -> list[SourceRecord]:
        """Adds texts, of which each is a document whose line is its number among the sources."""
        sources: dict[str, SourceRecord] = {}
        for document, heldout in parts:
            ids = self._job.tokenizer.encode(document.read())
            name = document.source.name
            known = sources.get(name) or SourceRecord(name, document.whole, document.sha256, 0)
            held = known.heldout_bytes + heldout * document.size
            sources[name] = SourceRecord(name, known.bytes, known.sha256, held)
            split = "heldout" if heldout else "train"
            self._writer.add(split, DEFAULT_SUBSET, ids, document.size, len(sources))
            progress(document.size)
        return list(sources.values())

    def read_file(self, source: Source, progress: Callable[[int], None]) -> SourceRecord:
        """Adds the documents of a file of records."""
        digest, size, held = hashlib.sha256(), 0, 0

        def note(content: bytes) -> None:
            nonlocal size
            digest.update(content)
            size += len(content)
            progress(len(content))

        for record in read_records(str(source.path), note, self._job.known):
            if isinstance(record, Bad):
                self._leave_out(source, record)
                continue
            content = record.text.encode()
            split = self._split(source, content)
            if split:
                ids = self._job.tokenizer.encode(record.text)
                self._writer.add(split, record.subset, ids, len(content), record.line)
                held += len(content) * (split == "heldout")
        if source.sha256 and digest.hexdigest() != source.sha256:
            raise UserError(
                f"{source.path} is not what was published (its SHA-256 is {digest.hexdigest()}, "
                f"not {source.sha256}): fetch it again"
            )
        return SourceRecord(source.name, size, digest.hexdigest(), held)

    def close(self, sources: list[SourceRecord]) -> ShardRecord:
        ranges = self._writer.close()
        if self._hashes:
            hashes = np.unique(np.asarray(self._hashes, "<u8"))
            (self._folder / _HASHES).write_bytes(hashes.tobytes())
        files = record_files(self._folder)
        record = ShardRecord(sources, ranges, self._bad, self._copies, files)
        (self._folder / NAME).write_text(record.to_json(), encoding="utf-8")
        return record

    def _split(self, source: Source, content: bytes) -> str | None:
        """Where a document goes: by its file, or by its hash; None for a copy of a held-out one."""
        if not source.heldout and not self._job.share and not len(self._heldout):
            return "train"
        value = hash_of(content)
        if source.heldout:
            self._hashes.append(value)
            return "heldout"
        at = np.searchsorted(self._heldout, np.uint64(value))
        if at < len(self._heldout) and self._heldout[at] == value:
            self._copies += 1
            return None
        # The same text has the same hash: copies of a document are all on one side.
        return "heldout" if is_held_out(value, self._job.share) else "train"

    def _leave_out(self, source: Source, bad: Bad) -> None:
        where = f"{source.name}:{bad.line}" if bad.line else source.name
        self._bad.append((where, bad.reason))
        if len(self._bad) > self._job.skip_bad:
            raise too_many_bad(self._bad, self._job.skip_bad)


def hash_of(content: bytes) -> int:
    """The hash of a document, of 64 bits."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")


def is_held_out(value: int, share: float) -> bool:
    """Whether a document of a hash is among the share of all documents that is held out."""
    return value < share * 2**64


def too_many_bad(bad: list[tuple[str, str]], allowed: int) -> UserError:
    """What to say of more bad documents than may be left out."""
    first = ", ".join(f"{where} ({why})" for where, why in bad[:3])
    also = f", and {len(bad) - 3} more" if len(bad) > 3 else ""
    return UserError(
        f"bad documents: {first}{also}; correct them, or leave up to N such out with "
        f"--data.skip_bad N (it is {allowed})"
    )
