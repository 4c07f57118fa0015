"""From emitted tokens to the dictionaries of a completion, whole or in chunks, as llama_cpp.Llama gives them."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from racer_local.config import DraftConfig
from racer_local.errors import ConfigError, ContextFullError
from racer_local.llama.parent import UNSEEDED, native_tokenizer, prompt_tokens
from racer_local.pieces import Likely, Progress, Token, pieces, text_of
from racer_local.stats import GenerationStats
from racer_local.target import Rows
from racer_local.text import StopMatcher
from racer_local.tree import Tokens

if TYPE_CHECKING:
    from racer_local.llm.drop_in import Llama

Logprobs = dict[str, list[Any]]
TextOf = Callable[[int], str]


class Answer:
    """What all dictionaries of an answer have in common."""

    def __init__(self, model: str) -> None:
        self._head = {"id": f"cmpl-{uuid.uuid4()}", "object": "text_completion", "created": int(time.time())}
        self._head["model"] = model

    def chunk(self, text: str, logprobs: Logprobs | None = None, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice]}

    def whole(self, text: str, logprobs: Logprobs | None, finish_reason: str, usage: tuple[int, int]) -> dict[str, Any]:
        counts = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
        return {**self.chunk(text, logprobs, finish_reason), "usage": counts}


def describe(tokens: Sequence[Token], text: TextOf, offset: int) -> Logprobs:
    """The `logprobs` of tokens whose text begins `offset` characters into the whole."""
    told: Logprobs = {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []}
    before = b""
    for token in tokens:
        own = text_of(token.data)
        told["tokens"].append(own)
        told["text_offset"].append(offset + len(text_of(before)))
        before += token.data
        likely = token.likely
        told["token_logprobs"].append(likely.logprob if likely else None)
        told["top_logprobs"].append(
            {**{text(i): logprob for i, logprob in likely.top}, own: likely.logprob} if likely else None
        )
    return told


def chunks(
    progress: Progress, steps: Iterable[Token], answer: Answer, text: TextOf | None, offset: int
) -> Iterator[dict[str, Any]]:
    """A chunk for each piece, and a last one that says why the answer ended.

    `text` is given where log probabilities are wanted.
    """
    for piece in pieces(progress, steps):
        logprobs = describe(piece.tokens, text, offset) if text else None
        offset += len(piece.text)
        yield answer.chunk(piece.text, logprobs)
    yield answer.chunk("", finish_reason=progress.finish_reason)


@dataclass
class Call:
    """What one call generates from."""

    prompt: list[int]
    settings: dict[str, Any]
    """The sampler's, by the parent's names (Llama._init_sampler)."""
    processors: Sequence[Any]
    criteria: Any
    draft: DraftConfig
    end_tokens: frozenset[int]
    max_tokens: int | None = None
    on_rows: Any = None
    """Sees the prompt's tokens and rows, chunk by chunk."""
    stats: GenerationStats = field(default_factory=GenerationStats)


class Completion:
    """One completion: from the parent's arguments to its dictionaries."""

    def __init__(
        self,
        llama: Llama,
        prompt: str | Sequence[int],
        draft: DraftConfig,
        *,
        suffix: str | None,
        max_tokens: int | None,
        temperature: float,
        logprobs: int | None,
        echo: bool,
        stop: str | Sequence[str] | None,
        seed: int | None,
        model: str | None,
        stopping_criteria: Any,
        logits_processor: Any,
        logit_bias: Mapping[int, float] | None,
        **settings: Any,
    ) -> None:
        self.llama, self.prompt, self.logprobs, self.echo = llama, prompt, logprobs, echo
        self.native = native_tokenizer(llama)
        stops = [stop] if isinstance(stop, str) else list(stop or [])
        self.progress = Progress(StopMatcher([text.encode("utf-8") for text in stops]))
        self.answer = Answer(model if model is not None else llama.model_path)
        tokens = prompt_tokens(llama, prompt, suffix)
        self._check(tokens)
        room = llama._n_ctx - len(tokens)
        processors = [*(logits_processor or [])] + ([Bias(logit_bias)] if logit_bias else [])
        self.call = Call(
            tokens,
            {"temp": temperature, **settings},
            processors,
            stopping_criteria,
            draft,
            llama._lent.end_tokens,
            max_tokens=room if max_tokens is None or max_tokens <= 0 else min(max_tokens, room),
        )
        self.ids: list[int] = []
        """All that came, those of a stop string too."""
        self.told: list[Token] = []
        """The prompt's tokens, where they are asked for with their log probabilities."""
        if echo and logprobs is not None:
            self.call.on_rows = self._see_prompt
        self._load_cached()
        if seed is not None:
            llama.set_seed(seed)
        elif llama._seed != UNSEEDED:
            llama.set_seed(random.Random(llama._seed).randint(0, 2**32))

    def _check(self, tokens: list[int]) -> None:
        if not tokens:
            raise ConfigError("the prompt is empty, and this model has no token to begin a text with; give some text")
        if len(tokens) >= self.llama._n_ctx:
            raise ContextFullError(f"Requested tokens ({len(tokens)}) exceed {self.llama._n_ctx_of()}")

    def steps(self) -> Generator[Token, None, None]:
        """The answer's tokens with their bytes, as they come."""
        with closing(self.llama._emit(self.call)) as emitted:
            for token, row, source in emitted:
                data = self._bytes_of(token)
                self.ids.append(token)
                yield Token(
                    token, data, None if self.logprobs is None else Likely.of(row, token, self.logprobs), source
                )
        if self.call.stats.finish_reason == "stop":
            self.progress.finish_reason = "stop"

    def chunks(self) -> Generator[dict[str, Any], None, None]:
        with closing(self.steps()) as steps:
            text = None if self.logprobs is None else self._text_of_id
            yield from chunks(self.progress, steps, self.answer, text, len(self.prompt))
        self._keep_cached()

    def whole(self) -> dict[str, Any]:
        progress = self.progress
        with closing(self.steps()) as steps:
            for token in steps:
                progress.push(token)
                if progress.stops.found:
                    break
        progress.finish()
        self._keep_cached()
        text, logprobs = text_of(progress.data), None
        if self.echo:
            text = self._prompt_text() + text
        if self.logprobs is not None:
            offset = 0 if self.echo else len(self.prompt)
            logprobs = describe([*self.told, *progress.tokens], self._text_of_id, offset)
        usage = len(self.call.prompt), len(progress.tokens)
        return self.answer.whole(text, logprobs, progress.finish_reason, usage)

    def _see_prompt(self, tokens: Tokens, rows: Rows) -> None:
        """Rows of the prompt's tokens: each tells of the next one."""
        prompt, wanted = self.call.prompt, self.logprobs or 0
        if not self.told:
            self.told = [Token(prompt[0], self._bytes_of(prompt[0]))]
        for row in rows:
            token = prompt[len(self.told)]
            self.told.append(Token(token, self._bytes_of(token), Likely.of(row, token, wanted)))

    def _prompt_text(self) -> str:
        if isinstance(self.prompt, str):
            return self.prompt
        return text_of(self.llama.detokenize(list(self.prompt)))

    def _bytes_of(self, token: int) -> bytes:
        llama = self.llama
        if not self.native:
            return bytes(llama.detokenize([token], prev_tokens=[*self.call.prompt, *self.ids]))
        data = llama._lent.piece(token)
        begins = not len(self.prompt) and not self.ids
        return data[1:] if begins and data.startswith(b" ") else data

    def _text_of_id(self, token: int) -> str:
        return text_of(self._bytes_of(token))

    def _load_cached(self) -> None:
        """A state that the caller's cache has of more of the prompt than the context holds."""
        llama, tokens = self.llama, self.call.prompt
        if not llama.cache:
            return
        try:
            state = llama.cache[tokens]
        except KeyError:
            return
        known = llama.longest_token_prefix(state.input_ids.tolist(), tokens)
        if known > llama.longest_token_prefix(llama._input_ids.tolist(), tokens):
            llama.load_state(state)

    def _keep_cached(self) -> None:
        llama = self.llama
        if llama.cache:
            llama.cache[[*self.call.prompt, *self.ids]] = llama.save_state()
        if llama.verbose:
            llama._ctx.print_timings()


class Bias:
    """`logit_bias` as a logits processor."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._bias = {int(token): float(value) for token, value in bias.items()}

    def __call__(self, ids: Any, logits: Any) -> Any:
        for token, value in self._bias.items():
            logits[token] += value
        return logits
