"""What a token store holds, and the checksums that prove it.

manifest.json    counts by split and subset, the tokenizer, what was left out; a checksum of itself
index.npy        int64 [ranges, 8], see `Index`: which documents of which subset lie where
rows/T.npy       int32 [windows]: rows of best-fit packing at length T, in the order of the index
shards.jsonl     the record of every shard, its inputs and checksums, a line each
"""

import hashlib
import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from latte.data.packing import LENGTHS
from latte.data.place import Place
from latte.data.shard import FileRecord, Range, ShardRecord, npy, windows_of
from latte.errors import UserError

FORMAT = 2
NAME = "manifest.json"
SHARDS = "shards.jsonl"
INDEX = "index.npy"
SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class Count:
    """Size of a split or subset: tokens with their separators, documents, and bytes of text."""

    tokens: int
    documents: int
    bytes: int

    def __add__(self, other: "Count") -> "Count":
        return Count(
            self.tokens + other.tokens,
            self.documents + other.documents,
            self.bytes + other.bytes,
        )


NOTHING = Count(0, 0, 0)


@dataclass(frozen=True)
class Manifest:
    """What a token store holds.

    corpus: where the text came from.
    vocab_size, fingerprint: of the tokenizer that made the tokens.
    weights: published proportions of the subsets, by tokens; empty where there are none.
    subsets: of each split, "train" and "heldout", and each subset.
    left_out: what is not in the store: files, or file:line, each with the reason.
    copies: documents that are not in the store because they are held-out ones.
    shards: how many there are; shard i is the folder shards/i, of five digits or more.
    bytes: of all files of all shards.
    files: every other file of the store but the manifest, by its path in the store.
    """

    corpus: str
    vocab_size: int
    fingerprint: str
    weights: dict[str, float]
    subsets: dict[str, dict[str, Count]]
    left_out: dict[str, str]
    copies: int
    shards: int
    bytes: int
    files: dict[str, FileRecord]

    @property
    def splits(self) -> dict[str, Count]:
        """The size of each split."""
        return {split: sum(self.subsets[split].values(), NOTHING) for split in SPLITS}

    def to_json(self) -> str:
        """The content of manifest.json."""
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps({"checksum": _checksum(content), **content}, indent=1) + "\n"


class Index(NamedTuple):
    """The ranges of one subset and split, in the order of its stream.

    shard: where each range lies. start, stop: in its `tokens`. first, documents: in its
    `documents`. bytes: of text. window: the first of its windows, in rows/T.npy.
    """

    shard: Int64[np.ndarray, " ranges"]
    start: Int64[np.ndarray, " ranges"]
    stop: Int64[np.ndarray, " ranges"]
    first: Int64[np.ndarray, " ranges"]
    documents: Int64[np.ndarray, " ranges"]
    bytes: Int64[np.ndarray, " ranges"]
    window: Int64[np.ndarray, " ranges"]


def shard_name(number: int) -> str:
    """The folder of a shard."""
    return f"shards/{number:05}"


def write_manifest(
    place: Place, records: Iterable[ShardRecord], files: dict[str, bytes], **known: Any
) -> Manifest:
    """Writes all that makes shards into a store; the manifest, which makes it whole, comes last.

    Args:
      records: of the shards, in their order.
      files: other files of the store.
      known: the fields of the manifest that do not follow from the shards.
    """
    ranges: dict[tuple[str, str], list[tuple[int, Range, np.ndarray]]] = {}
    lines, left_out, copies, size = [], {}, 0, 0
    for number, record in enumerate(records):
        rows, before = _load(place.read(f"{shard_name(number)}/rows.npy") or b""), 0
        for r in record.ranges:
            stop = before + windows_of(r.documents)
            ranges.setdefault((r.split, r.subset), []).append((number, r, rows[before:stop]))
            before = stop
        lines.append(record.to_json())
        left_out |= dict(record.bad)
        copies += record.copies
        size += sum(file.bytes for file in record.files.values())
    files = files | {SHARDS: ("\n".join(lines) + "\n").encode()} | _index(ranges)
    for name, content in files.items():
        place.write(name, content)
    manifest = Manifest(
        subsets={split: _counts(ranges, split) for split in SPLITS},
        left_out=known.pop("left_out") | left_out,
        copies=copies,
        shards=len(lines),
        bytes=size,
        files={
            name: FileRecord(len(content), hashlib.sha256(content).hexdigest())
            for name, content in sorted(files.items())
        },
        **known,
    )
    place.write(NAME, manifest.to_json().encode())
    return manifest


def _counts(
    ranges: dict[tuple[str, str], list[tuple[int, Range, np.ndarray]]], split: str
) -> dict[str, Count]:
    return {
        subset: sum((Count(r.stop - r.start, r.documents, r.bytes) for _, r, _ in some), NOTHING)
        for (of, subset), some in sorted(ranges.items())
        if of == split
    }


def _index(ranges: dict[tuple[str, str], list[tuple[int, Range, np.ndarray]]]) -> dict[str, bytes]:
    """The files index.npy and rows/T.npy."""
    table: list[tuple[int, ...]] = []
    rows = [np.empty((0, len(LENGTHS)), np.int32)]
    before = 0
    for key, (_, some) in enumerate(sorted(ranges.items())):
        for number, r, windows in some:
            table.append((key, number, *r[2:], before))
            before += len(windows)
            rows.append(windows)
    every = np.concatenate(rows)
    return {INDEX: npy(np.asarray(table, np.int64).reshape(-1, 8))} | {
        f"rows/{T}.npy": npy(np.ascontiguousarray(every[:, i])) for i, T in enumerate(LENGTHS)
    }


def read_manifest(place: Place) -> Manifest:
    """Reads the manifest of a store.

    Raises:
      UserError: it is missing, of another format, or not as it was written.
    """
    file = f"{place}/{NAME}"
    text = place.read(NAME)
    if text is None:
        raise UserError(f"{file} is missing: {mend(place)}")
    try:
        content = json.loads(text)
        checksum, version = content.pop("checksum"), content.pop("format")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({error}): {mend(place)}") from error
    if version != FORMAT:
        raise UserError(f"{file} has format {version}, not {FORMAT}: {mend(place)}")
    if checksum != _checksum({"format": version, **content}):
        raise UserError(f"{file} was changed after it was written: {mend(place)}")
    subsets = content["subsets"]
    return Manifest(
        **content
        | {
            "subsets": {
                split: {name: Count(**count) for name, count in subsets[split].items()}
                for split in SPLITS
            },
            "files": {name: FileRecord(**record) for name, record in content["files"].items()},
        }
    )


def read_index(place: Place, manifest: Manifest) -> dict[tuple[str, str], Index]:
    """The ranges of every (split, subset)."""
    table = _load(read_file(place, manifest, INDEX))
    keys = sorted((split, name) for split in SPLITS for name in manifest.subsets[split])
    return {
        key: Index(*np.ascontiguousarray(table[table[:, 0] == i, 1:].T))
        for i, key in enumerate(keys)
    }


def read_rows(place: Place, manifest: Manifest, T: int) -> Int32[np.ndarray, " windows"]:
    """Rows of best-fit packing of every window of documents; T is one of `LENGTHS`."""
    return _load(read_file(place, manifest, f"rows/{T}.npy"))


def read_records(place: Place, manifest: Manifest) -> list[ShardRecord]:
    """The record of every shard."""
    return [*map(ShardRecord.from_json, read_file(place, manifest, SHARDS).splitlines())]


def read_file(place: Place, manifest: Manifest, name: str) -> bytes:
    """A file that the manifest has the checksum of.

    Raises:
      UserError: it is missing, truncated or corrupt.
    """
    content = place.read(name)
    found = None if content is None else (len(content), hashlib.sha256(content).hexdigest())
    check_file(place, name, manifest.files[name], found)
    assert content is not None
    return content


def check_file(place: Place, name: str, record: FileRecord, found: tuple[int, str] | None) -> None:
    """Refuses a file that is not what it was, by its size and SHA-256, or None where it is not.

    Raises:
      UserError: it is missing, truncated or corrupt.
    """
    if found is None:
        raise UserError(f"{place}/{name} is missing: {mend(place)}")
    if found[0] != record.bytes:
        raise UserError(f"{place}/{name} has {found[0]} bytes, not {record.bytes}: {mend(place)}")
    if found[1] != record.sha256:
        raise UserError(f"{place}/{name} is corrupt (its checksum differs): {mend(place)}")


def mend(place: object) -> str:
    """What to do about a store that is not whole."""
    return f"delete the folder {place} and prepare the corpus again"


def _load(content: bytes) -> np.ndarray:
    return np.load(io.BytesIO(content))


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
