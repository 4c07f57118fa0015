"""A model server on this machine that can misbehave, and a models folder that is filled from it alone.

A test module takes the fixtures over by assignment: `server = local_server.server`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from racer_local.models import download
from racer_local.models import registry as registry_module

BODY = bytes(range(256)) * 400
SHA = hashlib.sha256(BODY).hexdigest()
ETAG = '"v1"'


@dataclass
class Page:
    """How the server answers one path."""

    body: bytes = b""
    status: int = 200
    kind: str = "application/octet-stream"
    etag: str | None = ETAG
    ranges: bool = True
    content_range: str | None = None
    """Sent instead of the right one."""
    cuts: list[int] = field(default_factory=list)
    """Each request uses one up and gets that many bytes before the connection drops."""
    wait_s: float = 0.0
    stall_s: float = 0.0
    """Between the last byte and the end of the connection."""
    chunked: bool = False
    location: str = ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.close_connection = True
        self.server.seen.append((self.path, {key.title(): value for key, value in self.headers.items()}))
        page = self.server.pages.get(self.path, Page(b"no such page", status=404))
        time.sleep(page.wait_s)
        start = self._start(page)
        if start is not None and start >= len(page.body):
            return self._head(Page(status=416), 0, None)
        body = page.body[start or 0 :]
        self._head(page, len(body), start)
        if page.chunked:
            return self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        self.wfile.write(body[: page.cuts.pop(0)] if page.cuts else body)
        time.sleep(page.stall_s)

    def _start(self, page: Page) -> int | None:
        asked = self.headers.get("Range")
        same = self.headers.get("If-Range") in (None, page.etag)
        return int(asked[len("bytes=") : -1]) if asked and page.ranges and same else None

    def _head(self, page: Page, length: int, start: int | None) -> None:
        self.send_response(page.status if start is None else 206)
        if start is not None:
            right = f"bytes {start}-{len(page.body) - 1}/{len(page.body)}"
            self.send_header("Content-Range", page.content_range or right)
        if page.etag:
            self.send_header("ETag", page.etag)
        if page.location:
            self.send_header("Location", page.location)
        self.send_header("Content-Type", page.kind)
        if page.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pages: dict[str, Page] = {}
        self.seen: list[tuple[str, dict[str, str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *args: object) -> None:
        """A client that hangs up is what some tests are about."""

    def headers_of(self, path: str) -> list[dict[str, str]]:
        return [headers for seen, headers in self.seen if seen == path]


@contextmanager
def serving() -> Iterator[Server]:
    made = Server()
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def server():
    with serving() as made:
        yield made


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch, server):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name in ("HF_TOKEN", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RACER_LOCAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("RACER_LOCAL_PYPI_INDEX", f"{server.url}/simple/")
    monkeypatch.setattr(download, "RETRY_PAUSE_S", 0.0)
    return tmp_path / "home"


HUB = {"kind": "hub", "repo": "some/repo", "file": "m.gguf", "revision": "main"}
HUB_PATH = "/some/repo/resolve/main/m.gguf"
PYPI = {"kind": "pypi", "parts": [{"package": "Tiny_Model", "version": "1.0", "member": "tiny/m.gguf"}]}
ENTRY = {
    "name": "tiny",
    "description": "a test",
    "licence": "Apache-2.0",
    "licence_url": "https://example.org",
    "file": "m.gguf",
    "size": len(BODY),
    "sha256": SHA,
    "sources": [HUB, PYPI],
}


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """Call it with changed fields of the entry `tiny` to write another registry."""
    path = tmp_path / "registry.json"
    monkeypatch.setattr(registry_module, "registry_path", lambda: path)

    def write(**changed):
        path.write_text(json.dumps({"models": [{**ENTRY, **changed}]}))

    write()
    return write


def folder(home: Path) -> Path:
    return home / "models"


def left_over(home: Path) -> list[str]:
    """What lies in the models folder, but for the lock file, which stays."""
    return sorted(path.name for path in folder(home).iterdir() if path.suffix != ".lock")


def half_there(home: Path, etag: str | None = ETAG, content: bytes = BODY[:50_000], name="m.gguf.part"):
    folder(home).mkdir(parents=True, exist_ok=True)
    (folder(home) / name).write_bytes(content)
    if etag:
        (folder(home) / f"{name}.etag").write_text(etag)


def make_wheel(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def serve_wheel(server: Server, wheel: bytes, project="tiny-model", name="tiny_model-1.0-py3-none-any.whl", **page):
    """A project page in a simple index and the wheel it points at, by a relative URL as mirrors do."""
    files = [
        {
            "filename": name.replace("-1.0-", "-0.9-"),
            "url": "../../wrong.whl",
            "hashes": {"sha256": "0" * 64},
        },
        {
            "filename": name,
            "url": f"../../files/{name}#sha256=x",
            "size": len(wheel),
            "hashes": {"sha256": hashlib.sha256(wheel).hexdigest()},
        },
    ]
    body = json.dumps({"name": project, "files": files}).encode()
    server.pages[f"/simple/{project}/"] = Page(body, kind="application/vnd.pypi.simple.v1+json")
    server.pages[f"/files/{name}"] = Page(wheel, **page)
    return f"/files/{name}"


class Recorder:
    def __init__(self):
        self.notes, self.steps = [], []

    def note(self, text):
        self.notes.append(text)

    def advance(self, done, total):
        self.steps.append((done, total))
