"""A bucket of Google Cloud Storage for tests: its JSON API over HTTP, as far as a run needs it.

Kept are what a store promises and file systems do not: objects are written whole, an upload can ask
for the generation that it replaces, and nothing can be renamed or appended to.

    python -m tests.training.bucket PORT
"""

import json
import re
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

NAME = "bucket"


class RefusedError(Exception):
    """Holds the status that the API answers with."""


@dataclass
class Bucket:
    """Objects by name: their content and generation, which grows by one with every upload; and
    uploads in parts, by number: the name and what has come of the content."""

    objects: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    newest: int = 0
    uploads: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, name: str, query: dict[str, str]) -> None:
        """Raises where an object is not of the generation that is asked for; 0 is that of none."""
        _, generation = self.objects.get(name, (b"", 0))
        if "ifGenerationMatch" in query and int(query["ifGenerationMatch"]) != generation:
            raise RefusedError(412)
        if "ifGenerationNotMatch" in query and int(query["ifGenerationNotMatch"]) == generation:
            raise RefusedError(304)

    def write(self, name: str, content: bytes, query: dict[str, str]) -> dict:
        with self.lock:
            self.check(name, query)
            self.newest += 1
            self.objects[name] = content, self.newest
            return self.about(name)

    def read(self, name: str, query: dict[str, str]) -> tuple[bytes, int]:
        with self.lock:
            self.check(name, query)
            if name not in self.objects:
                raise RefusedError(404)
            return self.objects[name]

    def delete(self, name: str, query: dict[str, str]) -> None:
        with self.lock:
            self.check(name, query)
            if self.objects.pop(name, None) is None:
                raise RefusedError(404)

    def about(self, name: str) -> dict:
        content, generation = self.objects[name]
        return {
            "kind": "storage#object",
            "bucket": NAME,
            "name": name,
            "size": str(len(content)),
            "generation": str(generation),
            "metageneration": "1",
            "updated": "2026-01-01T00:00:00.000Z",
            "timeCreated": "2026-01-01T00:00:00.000Z",
        }

    def list(self, query: dict[str, str]) -> dict:
        """Objects, or what a delimiter makes of their names; `startOffset` ≤ name < `endOffset`."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        start, end = query.get("startOffset", ""), query.get("endOffset")
        with self.lock:
            names = [n for n in sorted(self.objects) if n.startswith(prefix) and n >= start]
            names = [n for n in names if not end or n < end]
            deeper = [n for n in names if delimiter and delimiter in n[len(prefix) :]]
            cut = len(prefix)
            folders = {n[: n.index(delimiter or "", cut)] + (delimiter or "") for n in deeper}
            items = [self.about(n) for n in names if n not in deeper]
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)}


class Handler(BaseHTTPRequestHandler):
    """One request; answers are written by `do_…` through `_answer`."""

    protocol_version = "HTTP/1.1"
    bucket: Bucket

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            self._route(parts.path, query, body)
        except RefusedError as refused:
            [status] = refused.args
            self._answer(status, b'{"error": {"message": "refused"}}' if status != 304 else b"")

    do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

    def _route(self, path: str, query: dict[str, str], body: bytes) -> None:
        found = re.fullmatch(r"(?:/(upload|download))?/storage/v1/b/bucket(?:/o(?:/(.*))?)?", path)
        if found is None:
            raise RefusedError(404)
        name = unquote(found[2] or "")
        if found[1] == "upload":
            self._upload(query, body)
        elif self.command == "DELETE":
            self.bucket.delete(name, query)
            self._answer(204)
        elif name and query.get("alt") == "media":
            self._send(*self.bucket.read(name, query))
        elif name:
            self.bucket.read(name, query)
            self._json(self.bucket.about(name))
        elif path.endswith("/o"):
            self._json(self.bucket.list(query))
        else:
            self._json({"kind": "storage#bucket", "name": NAME})

    def _json(self, value: dict) -> None:
        self._answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def _upload(self, query: dict[str, str], body: bytes) -> None:
        match query.get("uploadType"):
            case "media":
                self._json(self.bucket.write(query["name"], body, query))
            case "multipart":
                # Two parts, each with headers of its own: what the object is, and its content.
                mark = re.search(r"boundary=['\"]?([^'\";]+)", self.headers["Content-Type"])
                assert mark is not None
                _, *parts, _ = body.split(b"--" + mark[1].encode())
                about, content = (re.split(rb"\r?\n\r?\n", x, maxsplit=1)[1] for x in parts)
                name = json.loads(about)["name"]
                self._json(self.bucket.write(name, content.removesuffix(b"\n"), query))
            case "resumable" if "upload_id" not in query:
                number = str(len(self.bucket.uploads))
                self.bucket.uploads[number] = query["name"], b""
                place = f"http://{self.headers['Host']}{self.path}&upload_id={number}"
                self._answer(200, Location=place)
            case _:
                self._go_on(query, body)

    def _go_on(self, query: dict[str, str], body: bytes) -> None:
        """One part of an upload; with the last one the object is there."""
        name, before = self.bucket.uploads[query["upload_id"]]
        content = before + body
        self.bucket.uploads[query["upload_id"]] = name, content
        if self.headers["Content-Range"].endswith("/*"):
            self._answer(308, Range=f"bytes=0-{len(content) - 1}")
        else:
            self._json(self.bucket.write(name, content, query))

    def _send(self, content: bytes, generation: int) -> None:
        """The whole object or a range of it."""
        about = {"Content_Type": "application/octet-stream", "x_goog_generation": str(generation)}
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if asked is None:
            self._answer(200, content, **about)
            return
        size = len(content)
        first = int(asked[1]) if asked[1] else max(0, size - int(asked[2]))
        last = min(size, int(asked[2]) + 1) if asked[1] and asked[2] else size
        if first >= size:
            raise RefusedError(416)
        about["Content_Range"] = f"bytes {first}-{last - 1}/{size}"
        self._answer(206, content[first:last], **about)


def serve(port: int) -> None:
    Handler.bucket = Bucket()
    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
