"""What a token store holds, and the checksums that prove it."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from latte.errors import UserError

FORMAT = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class Count:
    """Size of a split: tokens with their separators, documents, and bytes of text."""

    tokens: int
    documents: int
    bytes: int


@dataclass(frozen=True)
class SourceRecord:
    """An input file, and how many of its bytes are held out."""

    name: str
    bytes: int
    sha256: str
    heldout_bytes: int


@dataclass(frozen=True)
class FileRecord:
    """A file of the store."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a token store holds.

    corpus: where the text came from.
    vocab_size, fingerprint: of the tokenizer that made the tokens.
    splits: "train" and "heldout".
    left_out: files that are not in the store, each with the reason.
    files: every file of the store but the manifest, by its path in the store.
    """

    corpus: str
    vocab_size: int
    fingerprint: str
    splits: dict[str, Count]
    sources: list[SourceRecord]
    left_out: dict[str, str]
    files: dict[str, FileRecord]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest of a store, with a checksum of its own."""
    content = {"format": FORMAT, **asdict(manifest)}
    text = json.dumps({"checksum": _checksum(content), **content}, indent=1)
    (folder / NAME).write_text(text + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a store.

    Raises:
      UserError: it is missing, of another format, or not as it was written.
    """
    file = folder / NAME
    try:
        content = json.loads(file.read_text())
        checksum, version = content.pop("checksum"), content.pop("format")
    except FileNotFoundError as error:
        raise UserError(f"{file} is missing: {mend(folder)}") from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({error}): {mend(folder)}") from error
    if version != FORMAT:
        raise UserError(f"{file} has format {version}, not {FORMAT}: {mend(folder)}")
    if checksum != _checksum({"format": version, **content}):
        raise UserError(f"{file} was changed after it was written: {mend(folder)}")
    return Manifest(
        **content
        | {
            "splits": {name: Count(**count) for name, count in content["splits"].items()},
            "sources": [SourceRecord(**record) for record in content["sources"]],
            "files": {name: FileRecord(**record) for name, record in content["files"].items()},
        }
    )


def record_files(folder: Path) -> dict[str, FileRecord]:
    """The sizes and checksums of all files of a store, without its manifest."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != NAME)
    return {
        file.relative_to(folder).as_posix(): FileRecord(file.stat().st_size, _sha256(file))
        for file in files
    }


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Checks every file of a store against its manifest.

    Raises:
      UserError: a file is missing, truncated or corrupt.
    """
    for name, record in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file} is missing: {mend(folder)}")
        if file.stat().st_size != record.bytes:
            size = file.stat().st_size
            raise UserError(f"{file} has {size} bytes, not {record.bytes}: {mend(folder)}")
        if _sha256(file) != record.sha256:
            raise UserError(f"{file} is corrupt (its checksum differs): {mend(folder)}")


def mend(folder: Path) -> str:
    """What to do about a store that is not whole."""
    return f"delete the folder {folder} and prepare the corpus again"


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
