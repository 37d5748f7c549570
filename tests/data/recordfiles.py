"""Files of records, written for tests."""

import gzip
import io
import json
from collections.abc import Iterable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import zstandard

Rows = Iterable[tuple[str, str]]
"""Text and set name."""


def line(text: str, name: str, key: str = "pile_set_name") -> bytes:
    return json.dumps({"text": text, "meta": {key: name}}).encode() + b"\n"


def zst(content: bytes, frames: int = 1) -> bytes:
    """`content` packed in so many frames."""
    size = -(-len(content) // frames)
    pack = zstandard.ZstdCompressor().compress
    return b"".join(pack(content[at : at + size]) for at in range(0, len(content), size))


def write(path: Path, rows: Rows) -> Path:
    """A file in the format that its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack(path.name, rows))
    return path


def pack(name: str, rows: Rows) -> bytes:
    """The content of a file of that name."""
    if name.endswith(".parquet"):
        texts, names = zip(*rows, strict=True)
        metas = [{"pile_set_name": each} for each in names]
        table = pyarrow.table({"text": list(texts), "meta": metas})
        file = io.BytesIO()
        pyarrow.parquet.write_table(table, file)
        return file.getvalue()
    content = b"".join(line(*row) for row in rows)
    if name.endswith(".zst"):
        return zst(content, 3)
    return gzip.compress(content) if name.endswith(".gz") else content


def books(count: int, first: int = 0, names: tuple[str, ...] = ("A", "B", "C")) -> list:
    """Documents of their own for each number, of several sets."""
    return [
        (f"document {i} " + "word " * (i * 7 % 90) + "é😀", names[(i + i // 7) % len(names)])
        for i in range(first, first + count)
    ]
