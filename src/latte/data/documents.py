"""Files that are a document each: read, checked to be UTF-8, counted and hashed."""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from latte.data.corpus import Source
from latte.data.fetch import open_bytes
from latte.errors import UserError


class Document(NamedTuple):
    """A text: bytes `start` to `stop` of its file, of `whole` bytes, which hash to `sha256`."""

    source: Source
    sha256: str
    start: int
    stop: int
    whole: int

    @property
    def size(self) -> int:
        """Bytes of text."""
        return self.stop - self.start

    def read(self) -> str:
        """The text.

        Raises:
          UserError: the file can no longer be read, or is not what it was when it was surveyed.
        """
        data = _read(self.source)
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise UserError(f"{self.source.path} changed while it was being prepared: run again")
        return data[self.start : self.stop].decode()


class LeftOut(NamedTuple):
    """A file that is not in the corpus, and why; bad ones are left out only where that is asked."""

    name: str
    reason: str
    bad: bool


class Survey(NamedTuple):
    """What a corpus holds."""

    documents: list[Document]
    left_out: list[LeftOut]


def survey(
    sources: Sequence[Source], *, skip_bad: int, progress: Callable[[int], None] = lambda _: None
) -> Survey:
    """Reads every file once. Empty files and exact copies of an earlier file are left out.

    Args:
      skip_bad: leave out up to so many files that are not UTF-8 as well.
      progress: called with the bytes of each file that was read.

    Raises:
      UserError: a file cannot be read, or too many are not UTF-8.
    """
    documents: list[Document] = []
    left_out: list[LeftOut] = []
    seen: dict[str, str] = {}
    for source in sources:
        data = _read(source)
        progress(len(data))
        bad = _invalid_utf8(data)
        if bad and sum(left.bad for left in left_out) >= skip_bad:
            raise UserError(
                f"{source.path} is {bad}: convert it, or leave up to N such files out with "
                f"--data.skip_bad N (it is {skip_bad})"
            )
        digest = hashlib.sha256(data).hexdigest()
        reason = bad or ("" if data else "empty")
        if not reason and digest in seen:
            # A copy would be trained on twice, and might stand on both sides of the held-out split.
            reason = f"a copy of {seen[digest]}"
        if reason:
            left_out.append(LeftOut(source.name, reason, bool(bad)))
        else:
            seen[digest] = source.name
            documents.append(Document(source, digest, 0, len(data), len(data)))
    return Survey(documents, left_out)


def _read(source: Source) -> bytes:
    try:
        with open_bytes(str(source.path)) as file:
            return file.read()
    except OSError as error:
        raise UserError(f"cannot read {source.path}: {error.strerror}") from error


def _invalid_utf8(data: bytes) -> str:
    """What is wrong with `data`, or an empty string."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start}"
    return ""
