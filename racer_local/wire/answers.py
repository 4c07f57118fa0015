"""From pieces to OpenAI's objects, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from racer_local.llm.completion import describe
from racer_local.pieces import Piece, Token, text_of
from racer_local.stats import GenerationStats
from racer_local.tools import Call, Reader
from racer_local.tree import Source
from racer_local.wire.asking import Asked, Ended, Said
from racer_local.wire.requests import ChatRequest, RacerOptions

Choice = dict[str, Any]
PLAIN_FIELDS = ("draft", "exact", "row_limit", "disabled_reason")
"""What does not add up over several answers."""


@dataclass
class Growing:
    """One answer."""

    reader: Reader | None
    """Takes the calls out, where there are tools."""
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    begun: bool = False
    sources: list[tuple[str, str | None]] = field(default_factory=list)
    """Of each token, where they are asked for."""


class Answers:
    """The answers to one request: `chunks` of what has just been said, or at the end the `whole`."""

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, asked: Asked, model: str, number: int | None = None) -> None:
        """`number` makes the answer's id; without one it is a random one."""
        self._asked, request = asked, asked.request
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex if number is None else number}",
            "created": int(time.time()),
            "model": model,
        }
        self._growing: dict[int, Growing] = {}
        self.stats = GenerationStats()
        """Of all answers that have ended; a prompt that is answered several times is counted once."""
        self._times = request.n or 1
        self._shows_sources = isinstance(request.racer, RacerOptions) and request.racer.sources
        self._streams_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._finished: dict[int, str] = {}

    def chunks(self, words: Sequence[Said | Ended]) -> Iterator[dict[str, Any]]:
        """A chunk for what is said of each answer, and one for the end of each."""
        run: list[Said] = []
        for word in words:
            if run and (isinstance(word, Ended) or word.number != run[0].number):
                yield from self._chunk_of(run)
                run = []
            if isinstance(word, Said):
                run.append(word)
                continue
            for choice in self._end(word):
                yield self._chunk(choice)
            last = {} if self._streams_usage or len(self._finished) < self._answers else {"racer": self._racer()}
            yield {**self._chunk(self._last(word.number, self._finished[word.number])), **last}
        if run:
            yield from self._chunk_of(run)

    def tail(self) -> Iterator[dict[str, Any]]:
        """What comes when all have ended, if it is asked for: many clients look for a choice in every chunk."""
        if self._streams_usage:
            yield {**self._chunk(), "usage": self._usage(), "racer": self._racer()}

    def take(self, words: Sequence[Said | Ended]) -> None:
        """What is said, to be given as a whole."""
        for _ in self.chunks(words):
            pass

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(number) for number in sorted(self._finished)]
        racer = self._racer()
        if self._shows_sources:
            racer["sources"] = [self._growing[number].sources for number in sorted(self._finished)]
        told = {"choices": choices, "usage": self._usage(), "racer": racer}
        return {**self._head, "object": self.kind, **told}

    def _chunk_of(self, run: Sequence[Said]) -> Iterator[dict[str, Any]]:
        number, stats = run[0].number, run[-1].stats
        growing = self._of(number)
        tokens = [token for said in run for token in said.piece.tokens]
        text = "".join(said.piece.text for said in run)
        if growing.reader:
            text = growing.reader.push(text)
        growing.text += text
        growing.tokens += tokens
        choice = self._delta(number, growing, text, tokens)
        if text or not growing.reader or choice["logprobs"] or self._shows_sources:
            growing.begun = True
            more = {}
            if self._shows_sources:
                sources = [told for said in run for told in _sources(said.piece)]
                growing.sources += sources
                more = {"racer": self._live(sources, stats)}
            yield {**self._chunk(choice), **more}

    def _end(self, word: Ended) -> Iterator[Choice]:
        growing, number = self._of(word.number), word.number
        before = self.stats.prompt_tokens, self.stats.cached_tokens
        self.stats.add(word.stats)
        if number % self._times:
            self.stats.prompt_tokens, self.stats.cached_tokens = before
        for name in PLAIN_FIELDS:
            setattr(self.stats, name, getattr(word.stats, name))
        rest = ""
        if growing.reader:
            rest, growing.calls = growing.reader.finish()
            if getattr(self._asked.request, "parallel_tool_calls", None) is False:
                del growing.calls[1:]
            growing.text += rest
        self._finished[number] = "tool_calls" if growing.calls else word.stats.finish_reason or "stop"
        if rest or growing.calls or not growing.begun:
            yield self._delta(number, growing, rest, [], growing.calls)

    def _of(self, number: int) -> Growing:
        if number not in self._growing:
            prepared, request = self._asked.prepared, self._asked.request
            names = {tool.function.name for tool in getattr(request, "tools", None) or []}
            reader = Reader(prepared.style, names, inside=prepared.inside_call) if prepared.style else None
            self._growing[number] = Growing(reader)
        return self._growing[number]

    @property
    def _answers(self) -> int:
        """How many there will be."""
        return len(self._asked.prepared.prompts) * self._times

    def _chunk(self, *choices: Choice) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_kind, "choices": list(choices)}

    def _usage(self) -> dict[str, Any]:
        told = sum(len(growing.tokens) for growing in self._growing.values())
        stats = self.stats
        return {
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": told,
            "total_tokens": stats.prompt_tokens + told,
            "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": stats.accepted,
                "rejected_prediction_tokens": stats.drafted - stats.accepted,
            },
        }

    def _racer(self) -> dict[str, Any]:
        return {**self.stats.as_dict(), "plain_tokens_per_second": self._plain()}

    def _plain(self) -> float | None:
        """What plain decoding would make, as estimated."""
        seconds = self._asked.plain_seconds
        return round(1 / seconds, 3) if seconds else None

    def _live(self, sources: Sequence[tuple[str, str | None]], stats: GenerationStats) -> dict[str, Any]:
        return {
            "sources": sources,
            "emitted": stats.emitted,
            "steps": stats.steps,
            "decode_seconds": round(stats.decode_seconds, 6),
            "plain_tokens_per_second": self._plain(),
        }

    def _text(self, token: int) -> str:
        return text_of(self._asked.texts.get(token, b""))

    def _delta(
        self, number: int, growing: Growing, text: str, tokens: Sequence[Token], calls: Sequence[Call] = ()
    ) -> Choice:
        raise NotImplementedError

    def _last(self, number: int, reason: str) -> Choice:
        raise NotImplementedError

    def _choice(self, number: int) -> Choice:
        raise NotImplementedError


class ChatAnswers(Answers):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _delta(
        self, number: int, growing: Growing, text: str, tokens: Sequence[Token], calls: Sequence[Call] = ()
    ) -> Choice:
        delta: dict[str, Any] = {} if growing.begun else {"role": "assistant"}
        if text or not calls:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": i, **_as_tool_call(call)} for i, call in enumerate(calls)]
        return {"index": number, "delta": delta, "logprobs": self._logprobs(tokens), "finish_reason": None}

    def _last(self, number: int, reason: str) -> Choice:
        return {"index": number, "delta": {}, "logprobs": None, "finish_reason": reason}

    def _choice(self, number: int) -> Choice:
        growing = self._growing[number]
        message: dict[str, Any] = {"role": "assistant", "content": growing.text, "refusal": None}
        if growing.calls:
            message["content"] = growing.text.strip() or None
            message["tool_calls"] = [_as_tool_call(call) for call in growing.calls]
        logprobs = self._logprobs(growing.tokens)
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": self._finished[number]}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        request = self._asked.request
        if not (isinstance(request, ChatRequest) and request.logprobs and tokens):
            return None
        told = []
        for token in tokens:
            top = token.likely.top if token.likely else []
            logprob = token.likely.logprob if token.likely else 0.0
            entry = _logprob(token.data, logprob)
            told.append({**entry, "top_logprobs": [_logprob(self._asked.texts[i], value) for i, value in top]})
        return {"content": told, "refusal": None}


class TextAnswers(Answers):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _delta(
        self, number: int, growing: Growing, text: str, tokens: Sequence[Token], calls: Sequence[Call] = ()
    ) -> Choice:
        if not growing.begun:
            text = growing.text = self._echo(number) + text
        offset = len(growing.text) - len(text)
        return self._made(number, text, self._logprobs(tokens, offset), None)

    def _last(self, number: int, reason: str) -> Choice:
        return self._made(number, "", None, reason)

    def _choice(self, number: int) -> Choice:
        growing = self._growing[number]
        offset = len(self._echo(number))
        return self._made(number, growing.text, self._logprobs(growing.tokens, offset), self._finished[number])

    def _made(self, number: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> Choice:
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _echo(self, number: int) -> str:
        """The prompt's text, where it is asked for."""
        echoes = self._asked.prepared.echoes
        return echoes[number // self._times] if echoes else ""

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
        return None if self._asked.likely is None else describe(tokens, self._text, offset)


def _sources(piece: Piece) -> Iterator[tuple[str, str | None]]:
    """For each token its text, that of a shared character with the last one, and the source that drafted it; None for
    what ends a step."""
    for place, token in enumerate(piece.tokens, 1):
        text = piece.text if place == len(piece.tokens) else ""
        yield text, None if token.source is Source.ROOT else token.source.name.lower()


def _as_tool_call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _logprob(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}
