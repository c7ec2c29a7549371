"""A local HTTP server that gives prepared answers, one after the other."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass(frozen=True)
class Answer:
    """status; body; promised: length in the header, the body's if None."""

    status: int = 200
    body: bytes = b""
    promised: int | None = None


@dataclass
class Served:
    url: str
    requested: list[str]


@contextmanager
def serving(*answers: Answer) -> Iterator[Served]:
    """Serves on 127.0.0.1; each request gets the next answer, and the last one again when they are used up."""
    requested: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        given = answers[min(len(requested), len(answers) - 1)]
        requested.append(handler.path)
        handler.send_response(given.status)
        handler.send_header("Content-Length", str(len(given.body) if given.promised is None else given.promised))
        handler.end_headers()
        handler.wfile.write(given.body)

    with _running(answer) as url:
        yield Served(url, requested)


@contextmanager
def serving_hub(repository: str, folder: Path, spoilt: dict[str, Callable[[bytes], bytes]]) -> Iterator[Served]:
    """Serves `folder` as the data set `repository` of the hub; the files `spoilt` come changed the first time."""
    requested, spoilt, revision = [], dict(spoilt), "0123456789abcdef0123456789abcdef01234567"
    names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    listing = json.dumps({"id": repository, "sha": revision, "siblings": [{"rfilename": name} for name in names]})
    tree = []
    for name in names:
        content = (folder / name).read_bytes()
        lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        tree.append({"type": "file", "path": name, "size": len(content), "oid": revision, "lfs": lfs})

    def answer(handler: BaseHTTPRequestHandler) -> None:
        requested.append(handler.path)
        name = handler.path.partition(f"/datasets/{repository}/resolve/{revision}/")[2]
        body = (json.dumps(tree) if "/tree/" in handler.path else listing).encode()
        if handler.path.startswith("/datasets/"):
            if name not in names:
                handler.send_error(404)
                return
            body = (folder / name).read_bytes()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.send_header("X-Repo-Commit", revision)
        handler.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(spoilt.pop(name)(body) if name in spoilt else body)

    with _running(answer) as url:
        yield Served(url, requested)


@contextmanager
def _running(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        do_GET = do_HEAD = answer  # noqa: N815

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
