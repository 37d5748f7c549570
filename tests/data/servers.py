"""Servers of files, started for a test: a web server that breaks off, and one of S3's kind."""

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


@contextlib.contextmanager
def serve(kind: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Runs a server and gives its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def part_of(content: bytes, header: str | None) -> tuple[int, int] | None:
    """The range that a request asks for, in bytes; None for all."""
    if not header:
        return None
    first, _, last = header.removeprefix("bytes=").partition("-")
    if not first:
        return max(0, len(content) - int(last)), len(content)
    return int(first), min(len(content), int(last) + 1) if last else len(content)


class Handler(BaseHTTPRequestHandler):
    """Answers from `files`, by path."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]

    def log_message(self, *_) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_file(self, content: bytes, ranges: bool = True) -> None:
        part = part_of(content, self.headers.get("Range")) if ranges else None
        if part is None:
            self.answer(200, content, ETag=tag(content))
        elif part[0] >= len(content):
            self.answer(416)
        else:
            place = f"bytes {part[0]}-{part[1] - 1}/{len(content)}"
            self.answer(206, content[slice(*part)], ETag=tag(content), Content_Range=place)


def web_server(files: dict[str, bytes], *, cut: int = 0, ranges: bool = True):
    """A web server that breaks the connection after `cut` bytes of an answer, if that is not 0.

    Its `asked` are the ranges that were asked for.
    """

    class Web(Handler):
        asked: list[str | None] = []  # noqa: RUF012

        def do_GET(self) -> None:
            content = files.get(self.path)
            if content is None:
                return self.answer(404)
            self.asked.append(self.headers.get("Range"))
            if cut:
                whole, self.wfile = self.wfile, _Cut(self.wfile, cut)
                with contextlib.suppress(BrokenPipeError):
                    self.send_file(content, ranges)
                self.wfile = whole
                self.close_connection = True
            else:
                self.send_file(content, ranges)

    return Web


class _Cut:
    """A stream that ends after the headers and so many bytes of the body."""

    def __init__(self, stream, left: int):
        self._stream, self._left = stream, left

    def write(self, content: bytes) -> int:
        if not content.startswith(b"HTTP/"):
            content = content[: self._left]
        self._stream.write(content)
        self._stream.flush()
        return len(content)

    def flush(self) -> None:
        self._stream.flush()


def object_store(objects: dict[str, bytes]):
    """A server of S3's kind, as far as this package asks: objects by /bucket/key."""

    class Store(Handler):
        def do_PUT(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            objects[unquote(urlsplit(self.path).path)] = content
            self.answer(200, ETag=tag(content))

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            where = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(where.query).items()}
            bucket, _, key = unquote(where.path).lstrip("/").partition("/")
            if not key:
                return self.answer(200, self._listing(bucket, query).encode())
            content = objects.get(f"/{bucket}/{key}")
            if content is None:
                return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            self.send_file(content)

        def _listing(self, bucket: str, query: dict[str, str]) -> str:
            prefix = f"/{bucket}/{query.get('prefix', '')}"
            found = sorted(name for name in objects if name.startswith(prefix))
            items = "".join(
                f"<Contents><Key>{escape(name.removeprefix(f'/{bucket}/'))}</Key>"
                f"<Size>{len(objects[name])}</Size><ETag>x</ETag>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                for name in found
            )
            return (
                '<?xml version="1.0"?><ListBucketResult '
                'xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
                f"<Name>{bucket}</Name><KeyCount>{len(found)}</KeyCount><MaxKeys>1000</MaxKeys>"
                f"<IsTruncated>false</IsTruncated>{items}</ListBucketResult>"
            )

    return Store
