"""A server that plays a script: what the page sees of the real one, at will slow, failing, loading or locked."""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PAGE = Path(__file__).parents[1] / "racer_local" / "server" / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "txt": "text/plain"}
TURNS = ["context", None, "logits", "context", None, None, "corpus", "corpus", "logits", None]


def pieces_of(text):
    """The text as drafted tokens of every source, with a bonus token at the end of each step."""
    tokens = re.findall(r"\s?\S{1,5}|\s", text)
    sources = [TURNS[i % len(TURNS)] for i in range(len(tokens))]
    return list(zip(tokens, [*sources[:-1], None], strict=True))


@dataclass
class Answer:
    text: str = "Hello there."
    pause: float = 0.0  # seconds after each step
    hold: int | None = None  # waits for `release` after so many steps
    release: threading.Event = field(default_factory=threading.Event)
    error: str | None = None  # told in the middle of the stream
    drop: bool = False  # the connection breaks at the end
    finish: str = "stop"
    pieces: list | None = None
    disabled: str | None = None

    def steps(self):
        step = []
        for piece in self.pieces or pieces_of(self.text):
            step.append(piece)
            if piece[1] is None:
                yield step
                step = []

    def chunks(self):
        yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        if self.hold == 0:
            self.release.wait(20)
        emitted = 0
        for number, step in enumerate(self.steps(), 1):
            emitted += len(step)
            totals = {"emitted": emitted, "steps": number, "decode_seconds": number * 0.05}
            racer = {"sources": step, **totals, "plain_tokens_per_second": 19.8}
            text = "".join(piece for piece, _ in step)
            yield {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], "racer": racer}
            if number == self.hold:
                self.release.wait(20)
            time.sleep(self.pause)
        if self.error:
            yield {"error": {"message": self.error, "type": "server_error", "param": None, "code": None}}
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish}]}
        by = {source: sum(s == source for _, s in self.pieces or pieces_of(self.text)) for source in TURNS if source}
        accepted = sum(by.values())
        statistics = {
            "draft": "racer",
            **totals,
            "mean_accepted_tokens": emitted / number,
            "drafted": 3 * accepted,
            "accepted": accepted,
            "accepted_by_source": by,
            "prefill_seconds": 0.31,
            "tokens_per_second": emitted / totals["decode_seconds"],
            "plain_tokens_per_second": 19.8,
            "disabled_reason": self.disabled,
        }
        yield {"choices": [], "usage": {"prompt_tokens": 25, "completion_tokens": emitted}, "racer": statistics}


@dataclass
class Refusal:
    status: int
    message: str = "No."
    code: str | None = None
    headers: dict = field(default_factory=dict)


@dataclass
class Mock:
    url: str = ""
    script: list = field(default_factory=list)  # what the next chats get; after that, short answers
    key: str | None = None
    loading: int = 0  # so many times more /health is 503
    models: tuple = ("smollm2-135m",)
    corpora: tuple = ()
    bodies: list = field(default_factory=list)
    paths: list = field(default_factory=list)
    refused: set = field(default_factory=set)  # the statuses that a browser will log
    broken: threading.Event = field(default_factory=threading.Event)  # a stream was closed by the page
    expected: set = field(default_factory=set)  # lines that the browser may log


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    mock: Mock

    def log_message(self, *args):
        pass

    def reply(self, status, body, kind="application/json", headers=None):
        if status >= 400:
            self.mock.refused.add(status)
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, refusal):
        error = {"message": refusal.message, "type": "invalid_request_error", "param": None, "code": refusal.code}
        self.reply(refusal.status, {"error": error}, headers=refusal.headers)

    def closed(self):
        """Answers what is no file of the page unless the door is shut."""
        if self.mock.loading:
            self.refuse(Refusal(503, "The model is loading."))
        elif self.mock.key and self.headers["Authorization"] != f"Bearer {self.mock.key}":
            self.refuse(Refusal(401, "A key is needed.", "invalid_api_key"))
        else:
            return False
        return True

    def do_GET(self):
        self.mock.paths.append(self.path)
        if self.path == "/" or self.path.startswith("/page/"):
            file = PAGE / (self.path.removeprefix("/page/").split("?")[0] if self.path != "/" else "index.html")
            headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
            self.reply(200, file.read_bytes(), KINDS[file.suffix[1:]] + "; charset=utf-8", headers)
        elif self.path == "/health":
            status = 503 if self.mock.loading else 200
            self.mock.loading = max(0, self.mock.loading - 1)
            self.reply(status, {"status": "ok" if status == 200 else "loading"})
        elif not self.closed():
            names = self.mock.models if self.path == "/v1/models" else self.mock.corpora
            rows = [{"id": name, "n_ctx": 4096, "loaded": i == 0, "tokens": 123456} for i, name in enumerate(names)]
            self.reply(200, {"object": "list", "data": rows})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.closed():
            return
        self.mock.bodies.append(body)
        answer = self.mock.script.pop(0) if self.mock.script else Answer()
        if isinstance(answer, Refusal):
            self.refuse(answer)
            return
        self.close_connection = True
        try:
            self.stream(answer)
        except (BrokenPipeError, ConnectionResetError):
            self.mock.broken.set()

    def stream(self, answer):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b": keep-alive\n\n")
        for chunk in answer.chunks():
            if answer.drop and not chunk["choices"][0]["delta"]:
                return
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if "error" in chunk:
                return
        self.wfile.write(b"data: [DONE]\n\n")


@contextmanager
def mock_server():
    mock = Mock()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"mock": mock}))
    server.daemon_threads = True
    mock.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield mock
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
