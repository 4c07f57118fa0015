"""A server of its own process, for tests: `with serve(model, *flags) as server: httpx.get(server.url + "/health")`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx

CHAT = "/v1/chat/completions"


class Serving:
    def __init__(self, *flags):
        command = [sys.executable, "-m", "racer_local", "serve", "--port", "0", "--threads", "1", *map(str, flags)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines = []
        self._listening = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._listening.wait(60), self.lines
        found = next((match for line in self.lines if (match := re.search(r"listening on (\S+)", line))), None)
        assert found, self.lines
        self.url = found[1]

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if "listening on" in line:
                self._listening.set()
        self._listening.set()

    def wait_until_ready(self):
        for _ in range(600):
            if httpx.get(f"{self.url}/health").status_code == 200:
                return
            time.sleep(0.1)
        raise AssertionError(self.lines)

    @property
    def threads(self):
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    @property
    def resident_bytes(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait(self, seconds=30):
        return self.process.wait(seconds)


@contextmanager
def serve(model, *flags, ready=True):
    serving = Serving("-m", model, *flags)
    try:
        if ready:
            serving.wait_until_ready()
        yield serving
    finally:
        if serving.process.poll() is None:
            serving.stop()
        try:
            serving.wait()
        except subprocess.TimeoutExpired:
            serving.process.kill()
            raise


def user(text="seven eight"):
    return [{"role": "user", "content": text}]


def ask(client, to=CHAT, **body):
    return client.post(to, json={"messages": user(), **body} if to == CHAT else body)


def stream(client, to=CHAT, **body):
    """The chunks of a streamed answer."""
    body = {"messages": user(), **body} if to == CHAT else body
    with client.stream("POST", to, json={"stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        lines = [line[len("data: ") :] for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
