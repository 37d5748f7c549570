"""Where a store lies: a folder of this machine, or a URL of an object store, used alike.

Local folders, gs:// and s3:// all go through tensorstore, so that the arrays of a store and the
files beside them are found in one way. `AWS_ENDPOINT_URL` names an S3 server other than Amazon's.
"""

import hashlib
import os
import re
import shutil
import urllib.parse
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tensorstore as ts

from latte.errors import UserError

SCHEMES = ("gs", "s3")
"""Kinds of object store that are known."""
_UPLOADS = 8
"""Files of a folder that are sent at a time."""


@dataclass(frozen=True)
class Place:
    """A folder, by its path or its URL; files in it are named by relative posix paths."""

    url: str

    def __post_init__(self):
        if not self.is_local and self._parts.scheme not in SCHEMES:
            raise UserError(f"{self.url} is no place that is known: give a folder, gs:// or s3://")

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "Place":
        return Place(f"{self.url.rstrip('/')}/{name}")

    @property
    def is_local(self) -> bool:
        return "://" not in self.url

    @property
    def folder(self) -> Path:
        """The folder of a local place."""
        assert self.is_local
        return Path(self.url)

    def spec(self, name: str = "") -> dict[str, Any]:
        """What tensorstore calls the folder `name` of this place."""
        if self.is_local:
            return {"driver": "file", "path": f"{(self.folder / name).absolute()}/"}
        path = "/".join(part for part in (self._parts.path.strip("/"), name) if part)
        path = f"{path}/" if path else ""
        if self._parts.scheme == "gs":
            return {"driver": "gcs", "bucket": self._parts.netloc, "path": path}
        endpoint = os.environ.get("AWS_ENDPOINT_URL")
        region = os.environ.get("AWS_REGION", os.environ.get("AWS_DEFAULT_REGION", "us-east-1"))
        other: dict[str, Any] = {"endpoint": endpoint, "aws_region": region} if endpoint else {}
        if "AWS_ACCESS_KEY_ID" in os.environ:  # then it need not look, and complain, elsewhere
            other["aws_credentials"] = {"type": "environment"}
        return {"driver": "s3", "bucket": self._parts.netloc, "path": path, **other}

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes | None:
        """The bytes of a file, or of a part of it; None where there is no such file.

        Raises:
          UserError: the place cannot be read.
        """
        try:
            part = None if start is None and stop is None else slice(start, stop)
            found = self._files.read(name, byte_range=part).result()
        except (ValueError, OSError) as error:
            raise self._unreachable("read", error) from error
        return bytes(found.value) if found.state == "value" else None

    def digest(self, name: str) -> tuple[int, str] | None:
        """The size and SHA-256 of a file; None where there is no such file.

        Raises:
          UserError: the place cannot be read.
        """
        if self.is_local and (self.folder / name).is_file():
            with (self.folder / name).open("rb") as file:
                return os.fstat(file.fileno()).st_size, hashlib.file_digest(
                    file, "sha256"
                ).hexdigest()
        content = self.read(name)
        return None if content is None else (len(content), hashlib.sha256(content).hexdigest())

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, whole or not at all.

        Raises:
          UserError: the place cannot be written to. A full disk raises what tensorstore raises.
        """
        try:
            self._files.write(name, content).result()
        except (ValueError, OSError) as error:
            if self.is_local:
                raise
            raise self._unreachable("write to", error) from error

    def names(self, prefix: str = "") -> list[str]:
        """The files below a folder `prefix`, sorted, by their paths in this place.

        Raises:
          UserError: the place cannot be listed.
        """
        if self.is_local:
            found = (self.folder / prefix).rglob("*")
            return sorted(p.relative_to(self.folder).as_posix() for p in found if p.is_file())
        start = f"{prefix}/" if prefix else ""
        try:
            keys = self._files.list(ts.KvStore.KeyRange(start, start[:-1] + "0" if start else ""))
            return sorted(key.decode() for key in keys.result())
        except (ValueError, OSError) as error:
            raise self._unreachable("list", error) from error

    def size_is(self, name: str, size: int) -> bool:
        """Whether there is a file of at least `size` bytes; of exactly so many in a folder."""
        if self.is_local:
            file = self.folder / name
            return file.is_file() and file.stat().st_size == size
        return self.read(name, max(0, size - 1), size) is not None

    def commit(self, folder: Path, name: str, last: str) -> None:
        """Moves a folder of this machine to `name`; what is there already is the same, and stays.

        The folder lies in this place if it is local, and its file `last` is what says that it is
        whole: elsewhere that is sent when all others are there.
        """
        if self.is_local:
            target = self.folder / name
            for path in (*folder.rglob("*"), folder):
                sync(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                folder.rename(target)
            except OSError:
                if not (target / last).is_file():
                    raise
                shutil.rmtree(folder)
            sync(target.parent)
            return
        files = [path for path in _files_below(folder) if path.name != last]

        def send(path: Path) -> None:
            self.write(f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes())

        with ThreadPoolExecutor(_UPLOADS) as pool:
            list(pool.map(send, files))
        send(folder / last)
        shutil.rmtree(folder)

    @cached_property
    def _parts(self) -> urllib.parse.SplitResult:
        return urllib.parse.urlsplit(self.url)

    @cached_property
    def _files(self) -> ts.KvStore:
        return ts.KvStore.open(self.spec()).result()

    def __getstate__(self) -> str:
        return self.url

    def __setstate__(self, url: str) -> None:
        object.__setattr__(self, "url", url)

    def _unreachable(self, verb: str, error: Exception) -> UserError:
        words = " ".join(str(error).split())[:200]
        return UserError(
            f"cannot {verb} {self.url} ({words}); check its name, and that this machine may do so"
        )


def sync(path: Path) -> None:
    """Makes sure that a file or folder is on the disk, not only on its way."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_error(error: Exception) -> int | None:
    """The system's error number, where a file of this machine could not be written."""
    if isinstance(error, OSError):
        return error.errno
    # tensorstore raises ValueError with the number in its message.
    number = re.search(r"os_error_code='(\d+)'", str(error))
    return int(number[1]) if number else None


def _files_below(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def walk(path: Path) -> Iterator[Path]:
    """Every file under a folder whose name, and folder, begins with no dot.

    Raises:
      UserError: a folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"cannot list {error.filename}: {error.strerror}") from error

    for folder, folders, files in os.walk(path, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in (Path(folder, name) for name in files if not name.startswith(".")):
            # A dangling link is kept, so that reading it is what names it; a pipe would hang.
            if file.is_file() or file.is_symlink():
                yield file
