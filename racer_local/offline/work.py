"""Answering many requests with one session: those that begin alike one after the other, each record when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from racer_local.config import SamplingConfig
from racer_local.errors import RacerError
from racer_local.offline.lines import Line
from racer_local.session import Session
from racer_local.stats import GenerationStats
from racer_local.target import never
from racer_local.wire import asking
from racer_local.wire.answers import Answers
from racer_local.wire.asking import Ended, Said
from racer_local.wire.errors import ApiError

COMPARED = 8192
"""Tokens of a prompt by which it finds its place among others."""
Record = dict[str, Any]
PASSING = (RacerError, ApiError, ValueError, TypeError, LookupError, RuntimeError, ArithmeticError)
"""What one line may bring about and the next one not; a dead disk or no memory is not among it."""


@dataclass
class Done:
    """What was answered so far."""

    answered: int = 0
    errors: int = 0
    stats: GenerationStats = field(default_factory=GenerationStats)
    """Of all answers together."""
    plain_forward: float | None = None
    """Seconds of a forward of one token."""

    @property
    def read_tokens(self) -> int:
        """Prompt tokens that were evaluated."""
        return self.stats.prompt_tokens - self.stats.cached_tokens

    @property
    def plain_seconds(self) -> float | None:
        """About what it would have taken to read each prompt whole and decode plainly, at the speed measured here."""
        if not self.plain_forward or not self.read_tokens:
            return None
        per_token = self.stats.prefill_seconds / self.read_tokens
        return self.stats.prompt_tokens * per_token + self.stats.emitted * self.plain_forward


def by_prefix(session: Session, lines: Sequence[Line], stopped: Callable[[], bool] = never) -> list[Line]:
    """In an order in which prompts that begin alike follow each other, so that what they share is evaluated once.

    It is that of their tokens; what the cache can keep from one prompt to the next is then the most it could keep from
    any. Lines whose prompt can't be made come first: they cost nothing. None, once it is `stopped`.
    """
    keys: list[bytes] = []
    for line in lines:
        if stopped():
            return []
        keys.append(_key(session, line))
    return [lines[i] for i in sorted(range(len(lines)), key=keys.__getitem__)]


def _key(session: Session, line: Line) -> bytes:
    if line.asked is None:
        return b""
    try:
        prompts = line.asked.prepare(session).prompts
    except PASSING:
        return b""
    return np.asarray(prompts[0][:COMPARED], ">i4").tobytes()  # compared as bytes, they are in the order of the ids


def answer_all(
    session: Session, lines: Sequence[Line], sampling: SamplingConfig, stopped: Callable[[], bool], done: Done
) -> Iterator[tuple[Line, Record]]:
    """Each line with its record, until `stopped`; the line that was being answered then is not among them.

    What can't be answered is a record of an error; what was learned from one answer drafts for the next ones.
    """
    for line in lines:
        if stopped():
            return
        record = answer_line(session, line, sampling, stopped, done)
        if record is None:
            return
        yield line, record


def answer_line(
    session: Session, line: Line, sampling: SamplingConfig, stopped: Callable[[], bool], done: Done
) -> Record | None:
    """A line's record, or None if it was stopped."""
    if line.asked is None or line.error:
        done.errors += 1
        return error_record(line, line.error or ApiError(422, "the line asks nothing"))
    listener, name = _Listener(stopped), session.model.path.stem
    stats = GenerationStats()
    try:
        asking.answer(listener, session, line.asked, sampling, list, stats.add)
    except PASSING as error:
        done.errors += 1
        known = isinstance(error, (RacerError, ApiError))
        return error_record(line, ApiError.of(error) if known else ApiError(500, f"{type(error).__name__}: {error}"))
    if listener.cancelled:
        return None
    answers = line.kind(line.asked, name, line.number)
    answers.take(listener.words)
    done.answered += 1
    done.stats.add(stats)
    done.plain_forward = session.cost.plain_seconds if session.cost else _plain_forward(done.stats)
    return _record(line, answers)


def _plain_forward(stats: GenerationStats) -> float | None:
    return stats.decode_seconds / stats.steps if stats.steps and not stats.drafted else None


class _Listener:
    """Keeps the words of an answer until it is whole."""

    def __init__(self, stopped: Callable[[], bool]) -> None:
        self.is_cancelled = stopped
        self.words: list[Said | Ended] = []
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        self._cancelled = self._cancelled or self.is_cancelled()
        return self._cancelled

    def tell(self, word: Said | Ended, *, ends_step: bool = True, at_once: bool = False) -> None:
        self.words.append(word)


def _record(line: Line, answers: Answers) -> Record:
    whole = answers.whole()
    messages = [choice.get("message") or {"content": choice["text"]} for choice in whole["choices"]]
    told = {
        **_head(line),
        "text": messages[0]["content"],
        "finish_reason": whole["choices"][0]["finish_reason"],
        "usage": whole["usage"],
        "stats": whole["racer"],
        "error": None,
    }
    if len(messages) > 1:
        told["texts"] = [message["content"] for message in messages]
    if "tool_calls" in messages[0]:
        told["tool_calls"] = messages[0]["tool_calls"]
    if line.batch:
        told["response"] = {"status_code": 200, "request_id": whole["id"], "body": whole}
    return told


def error_record(line: Line, error: ApiError) -> Record:
    """What stands in the output for a line that can't be answered."""
    said = error.body["error"]
    told = {**_head(line), "text": None, "finish_reason": None, "usage": None, "stats": None, "error": said}
    return {**told, "response": None} if line.batch else told


def _head(line: Line) -> Mapping[str, Any]:
    return {"id": line.id, **({"custom_id": line.id} if line.batch else {})}
