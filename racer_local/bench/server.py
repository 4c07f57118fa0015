"""What the server costs over a session of the same process: the same prompts through both, one after the other."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple

from racer_local.bench.data import Question
from racer_local.bench.ways import WARM_UP_PROMPT, WARM_UP_TOKENS
from racer_local.config import ContextConfig, DraftConfig, ModelConfig, SamplingConfig, ServerConfig
from racer_local.errors import ContextFullError, ModelError, RacerError
from racer_local.llama import Model
from racer_local.session import Session

NAME = "model"
PATIENCE_S = 300
"""Seconds for the server to load the model."""


class Told(NamedTuple):
    """An answer as it was read."""

    text: str
    tokens: int
    first_at: float
    """When the first word came (perf_counter)."""


Way = Callable[[str, str, int], Told]
"""From a prompt, a drafter and a number of tokens to an answer."""


@dataclass
class Taken:
    """What answers took as their reader sees them. Times are seconds."""

    tokens: int = 0
    seconds: float = 0.0
    """From the question to the last word."""
    later_tokens: int = 0
    """Behind those that came first."""
    later_seconds: float = 0.0
    """From the first word to the last."""

    def add(self, told: Told, started: float, ended: float) -> None:
        self.tokens += told.tokens
        self.seconds += ended - started
        self.later_tokens += told.tokens - 1
        self.later_seconds += ended - told.first_at

    @property
    def rate(self) -> float:
        """Tokens a second, without the time to read the prompt."""
        return self.later_tokens / self.later_seconds if self.later_seconds else 0.0

    @property
    def whole_rate(self) -> float:
        """Tokens a second, with it."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Overhead:
    """By drafter, without the server and through it."""

    direct: dict[str, Taken] = field(default_factory=dict)
    served: dict[str, Taken] = field(default_factory=dict)
    answers: int = 0
    different: int = 0
    """Answers whose texts differ: a tree's size follows measured times, and a near tie may tip."""

    def as_dict(self) -> dict[str, Any]:
        return {
            draft: {
                "direct_tokens_per_second": round(self.direct[draft].rate, 2),
                "served_tokens_per_second": round(self.served[draft].rate, 2),
                "overhead": round(1 - self.served[draft].rate / self.direct[draft].rate, 4),
                "overhead_with_prompt": round(1 - self.served[draft].whole_rate / self.direct[draft].whole_rate, 4),
                "tokens": [self.direct[draft].tokens, self.served[draft].tokens],
            }
            for draft in self.direct
        }


def measure(
    path: Path,
    config: ModelConfig,
    context: ContextConfig,
    questions: Sequence[Question],
    drafts: Sequence[str],
    max_tokens: int,
) -> Iterator[Overhead]:
    """What was measured so far, after every prompt. Greedy, streamed. Who is first changes with every prompt."""
    found = Overhead({draft: Taken() for draft in drafts}, {draft: Taken() for draft in drafts})
    widest = DraftConfig()
    with (
        _served(path, config, context, widest) as port,
        Model(path, config) as model,
        Session(model, context, widest) as session,
    ):
        ways: dict[str, Way] = {"direct": partial(_direct, session), "served": partial(_asked, port)}
        for draft in drafts:
            for way in ways.values():
                way(WARM_UP_PROMPT, draft, WARM_UP_TOKENS)
        for question in questions:
            for draft in drafts:
                order = [*ways][:: -1 if found.answers % 2 else 1]
                answers: dict[str, tuple[Told, float, float]] = {}
                try:
                    for name in order:
                        started = perf_counter()
                        answers[name] = ways[name](question.turns[0], draft, max_tokens), started, perf_counter()
                except ContextFullError:
                    continue
                for name, answer in answers.items():
                    getattr(found, name)[draft].add(*answer)
                found.answers += 1
                found.different += len({told.text for told, *_ in answers.values()}) > 1
                yield found


def _direct(session: Session, text: str, draft: str, max_tokens: int) -> Told:
    told, tokens, first_at = "", 0, 0.0
    for piece in session.stream(text, max_tokens=max_tokens, draft=session.for_answer({"draft": draft})):
        first_at = first_at or perf_counter()
        told += piece.text
        tokens += len(piece.tokens)
    return Told(told, tokens, first_at or perf_counter())


def _asked(port: int, text: str, draft: str, max_tokens: int) -> Told:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "racer": {"draft": draft},
    }
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response, told, tokens, first_at = connection.getresponse(), "", 0, 0.0
    if response.status != 200:
        told = response.read().decode()
        kind = ContextFullError if "context_length_exceeded" in told else RacerError
        raise kind(f"the server answered {response.status}: {told}")
    for line in response:
        if line.startswith(b"data: {"):
            first_at = first_at or perf_counter()
            chunk = json.loads(line[6:])
            told += "".join(choice["delta"].get("content", "") for choice in chunk["choices"])
            tokens = chunk.get("usage", {}).get("completion_tokens", tokens)
    connection.close()
    return Told(told, tokens, first_at or perf_counter())


@contextmanager
def _served(path: Path, model: ModelConfig, context: ContextConfig, draft: DraftConfig) -> Iterator[int]:
    """A server in a process of its own; its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = {NAME: path}, ServerConfig(port=port), model, context, draft, SamplingConfig()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=arguments, daemon=True)
    process.start()
    try:
        for _ in range(10 * PATIENCE_S):
            sleep(0.1)
            if process.exitcode is not None:
                raise ModelError("the server ended before it was ready; see what it printed")
            if _is_ready(port):
                break
        yield port
    finally:
        process.terminate()
        process.join()


def _serve(*arguments: Any) -> None:
    from racer_local.server.run import serve

    try:
        serve(*arguments)
    except RacerError as error:
        sys.exit(f"racer-local: {error}")


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
