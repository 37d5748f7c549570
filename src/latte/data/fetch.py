"""The bytes of an input file: of this machine, an object store, or a web server, as one stream."""

import contextlib
import http.client
import io
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from latte.data.place import walk
from latte.errors import UserError

WEB = ("http://", "https://")
_HUB = re.compile(r"(https?://[^/]+)/datasets/([^/]+/[^/]+)/resolve/([^/]+)(/.*)?")
"""A data set, or a folder of one, on the Hugging Face hub."""
_PART = 8 << 20
"""Bytes that are asked of an object store at a time."""
_TRIES = 6
"""Connections in a row that may break without a byte, before a server counts as lost."""
_TIMEOUT = 60
"""Seconds of silence after which a connection counts as broken."""


@runtime_checkable
class ByteStream(Protocol):
    """A file as far as it is read from its beginning to its end."""

    def read(self, size: int = -1, /) -> bytes: ...

    def close(self) -> None: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> Any: ...


def open_bytes(path: str) -> ByteStream:
    """Opens a file by its path, or by an http(s)://, gs:// or s3:// URL.

    Raises:
      UserError: it cannot be opened; reading raises this too, where it cannot go on.
    """
    if path.startswith(WEB):
        return io.BufferedReader(_WebFile(path), 1 << 20)
    if is_url(path):
        with _errors(path):
            store, name = _store(path)
            return store.open_input_stream(name, compression=None, buffer_size=_PART)
    try:
        return open(path, "rb")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def read_if_there(path: str) -> bytes:
    """The bytes of a small file; none where it is not there, or cannot be had."""
    try:
        with open_bytes(path) as file:
            return file.read()
    except UserError:
        return b""


def is_url(path: str) -> bool:
    """Whether a path names something that is not in a folder of this machine."""
    return "://" in path


def list_files(place: str) -> dict[str, str]:
    """All files below a folder or URL, by their paths relative to it, and their SHA-256 or "".

    A lone file is called "". A web server lists nothing, but for a data set of the Hugging Face
    hub, which knows the checksums of its large files.

    Raises:
      UserError: it cannot be listed.
    """
    if not is_url(place):
        return {file.relative_to(place).as_posix(): "" for file in walk(Path(place))}
    with _errors(place):
        if place.startswith(WEB):
            hub = _HUB.fullmatch(place)
            parts = [urllib.parse.unquote(part or "") for part in hub.groups()] if hub else []
            return _list_hub(*parts) if hub else {}
        return dict.fromkeys(_list_store(place), "")


def _list_hub(host: str, name: str, revision: str, folder: str) -> dict[str, str]:
    import huggingface_hub
    import huggingface_hub.errors

    tree = huggingface_hub.HfApi(endpoint=host).list_repo_tree(
        name, folder.strip("/"), recursive=True, revision=revision, repo_type="dataset"
    )
    try:
        files = [item for item in tree if isinstance(item, huggingface_hub.RepoFile)]
    except huggingface_hub.errors.HfHubHTTPError as error:
        if error.response is not None and error.response.status_code == 404:
            return {}  # no folder: a lone file, or a mistake that opening it will tell
        raise
    return {
        os.path.relpath(file.path, folder.strip("/") or "."): file.lfs.sha256 if file.lfs else ""
        for file in files
    }


def _list_store(url: str) -> list[str]:
    import pyarrow.fs

    store, root = _store(url)
    if store.get_file_info(root).type == pyarrow.fs.FileType.File:
        return [""]
    found = store.get_file_info(pyarrow.fs.FileSelector(root, recursive=True))
    files = (info.path for info in found if info.type == pyarrow.fs.FileType.File)
    return sorted(path.removeprefix(root).lstrip("/") for path in files)


def size_of(path: str) -> int:
    """The bytes of a file; 0 where only reading it would tell."""
    if path.startswith(WEB):
        return 0
    if is_url(path):
        with _errors(path):
            store, name = _store(path)
            return int(store.get_file_info(name).size or 0)
    return os.path.getsize(path) if os.path.exists(path) else 0


def _store(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    import pyarrow.fs

    scheme, _, name = url.partition("://")
    if scheme == "s3" and "AWS_ENDPOINT_URL" in os.environ:
        where, _, host = os.environ["AWS_ENDPOINT_URL"].partition("://")
        region = os.environ.get("AWS_DEFAULT_REGION", "us-east-1")
        store = pyarrow.fs.S3FileSystem(endpoint_override=host, scheme=where, region=region)
        return store, name.rstrip("/")
    return pyarrow.fs.FileSystem.from_uri(url.rstrip("/"))


@contextlib.contextmanager
def _errors(url: str) -> Iterator[None]:
    """Turns whatever a store says into a sentence that names the URL."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"{url} needs a package that is not installed ({error.name}); "
            "pip install 'latte-lm[prepare]'"
        ) from error
    except FileNotFoundError as error:
        raise UserError(f"{url} does not exist: correct the path") from error
    except UserError:
        raise
    except (OSError, ValueError) as error:
        words = " ".join(str(error).split())[:200]
        raise UserError(
            f"{url} cannot be read ({words}); check its name, and that this machine may read there"
        ) from error


class _WebFile(io.RawIOBase):
    """A file of a web server. A connection that breaks is made anew from the byte reached."""

    def __init__(self, url: str):
        self._url, self._at, self._tag = url, 0, ""
        self._length: int | None = None
        self._response: http.client.HTTPResponse | None = None
        self._response = self._connect()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        for attempt in range(_TRIES):
            try:
                self._response = self._response or self._connect()
                count = self._response.readinto(buffer)
                if count or self._length in (None, self._at):
                    self._at += count
                    return count
                reason: object = "it ended too early"
            except (OSError, http.client.HTTPException) as error:
                reason = error
            self._response = None
            time.sleep(0.1 * 2**attempt)
        raise UserError(
            f"the connection to {self._url} broke at byte {self._at} and could not be made again "
            f"({reason}); run the same command again"
        )

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
        super().close()

    def _connect(self) -> http.client.HTTPResponse:
        """Asks for what is left; a server that knows no ranges is read over again up to there."""
        headers = {"Range": f"bytes={self._at}-", "If-Range": self._tag} if self._at else {}
        request = urllib.request.Request(self._url, headers=headers)
        if "HF_TOKEN" in os.environ and self._url.startswith("https://huggingface.co/"):
            # For that host alone, not for the one that it sends on to.
            request.add_unredirected_header("Authorization", f"Bearer {os.environ['HF_TOKEN']}")
        try:
            response = cast(
                http.client.HTTPResponse, urllib.request.urlopen(request, timeout=_TIMEOUT)
            )
        except urllib.error.HTTPError as error:
            if error.code >= 500:
                raise
            raise UserError(f"{self._url} cannot be read ({error}): correct the URL") from error
        except urllib.error.URLError as error:
            if self._at == 0:
                raise UserError(f"{self._url} cannot be reached ({error.reason})") from error
            raise
        tag = response.headers.get("ETag", "")
        if self._at and tag != self._tag:
            raise UserError(f"{self._url} changed while it was being read: run again")
        self._tag = tag
        if response.status == 200:
            length = response.headers.get("Content-Length")
            self._length = int(length) if length else None
            self._skip(response)
        return response

    def _skip(self, response: http.client.HTTPResponse) -> None:
        left = self._at
        while left:
            read = len(response.read(min(left, 1 << 20)))
            if not read:
                raise http.client.IncompleteRead(b"", left)
            left -= read
