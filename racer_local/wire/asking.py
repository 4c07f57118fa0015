"""From a request to an answer's pieces: what runs on the thread that owns the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from racer_local.config import SamplingConfig, ServerConfig
from racer_local.errors import ConfigError
from racer_local.llama.chat import check_length, render_chat
from racer_local.llama.grammar import ANY_OBJECT, grammar_of, wrapped
from racer_local.pieces import Piece, text_of
from racer_local.session import Session
from racer_local.stats import GenerationStats
from racer_local.tools import Style
from racer_local.tree import Source
from racer_local.wire.errors import ApiError
from racer_local.wire.requests import ChatRequest, CompletionRequest, RacerOptions, Sampling, ToolChoice

Corpora = Callable[[Sequence[str]], list[str]]
"""From the ids of indexes to their files."""


@dataclass(frozen=True)
class Prepared:
    """What a model is asked, in its own tokens."""

    prompts: list[list[int]]
    grammar: str | None = None
    echoes: Sequence[str] = ()
    """The prompts' texts, where they are asked for."""
    style: Style | None = None
    """Of the calls that the answer may hold; None: there are no tools."""
    inside_call: bool = False
    """Whether the prompt ends within a call."""


@dataclass
class Asked:
    """A request on its way, and what is known of it on both threads."""

    request: Sampling
    prepare: Callable[[Session], Prepared]
    most: int | None
    likely: int | None
    owner: str
    prepared: Prepared = field(default_factory=lambda: Prepared([]))
    plain_seconds: float | None = None
    """Of a plain forward, as estimated."""
    texts: dict[int, bytes] = field(default_factory=dict)
    """Of the tokens that are told of: the model may be closed by the time that they are."""

    def know(self, session: Session, tokens: Iterable[int]) -> None:
        """Take the texts of these tokens in."""
        for token in tokens:
            if token not in self.texts:
                self.texts[token] = session.model.piece(token)


class Said(NamedTuple):
    """A piece of the answer of this number."""

    number: int
    piece: Piece
    stats: GenerationStats


class Ended(NamedTuple):
    number: int
    stats: GenerationStats


class Listener(Protocol):
    """Who gets the words of an answer, and may not want it any more."""

    @property
    def cancelled(self) -> bool: ...

    def is_cancelled(self) -> bool: ...

    def tell(self, word: Said | Ended, *, ends_step: bool = True, at_once: bool = False) -> None:
        """ends_step: False for words of which more come at the same moment; at_once: nothing follows soon."""


def answer(
    job: Listener,
    session: Session,
    asked: Asked,
    default: SamplingConfig,
    corpora: Corpora,
    count: Callable[[GenerationStats], object],
) -> None:
    """Answer each prompt as often as is asked, one after the other; `count` gets what each took, also of one that is
    not finished. Raises what `ApiError.of` knows."""
    request = asked.request
    draft = session.for_answer(_drafts(request, corpora))
    prepared = asked.prepare(session)
    asked.prepared = prepared
    times = request.n or 1
    for number in range(len(prepared.prompts) * times):
        stats = GenerationStats()
        stream = session.stream(
            prepared.prompts[number // times],
            sampling=request.sampling(default, number % times, prepared.grammar),
            max_tokens=asked.most,
            stop=request.stops,
            likely=asked.likely,
            draft=draft,
            owner=asked.owner,
            stats=stats,
            cancelled=job.is_cancelled,
        )
        with ExitStack() as stack:
            stack.callback(count, stats)
            for piece in stack.enter_context(closing(stream)):
                if job.cancelled:
                    break
                if asked.likely:
                    asked.know(session, (i for token in piece.tokens if token.likely for i, _ in token.likely.top))
                last = piece.tokens[-1] if piece.tokens else None
                asked.plain_seconds = session.cost.plain_seconds if session.cost else None
                job.tell(Said(number, piece, stats), ends_step=last is None or last.source is Source.ROOT)
        if job.cancelled:
            return
        stats.prompt_tokens = len(prepared.prompts[number // times])  # also where nothing was to be answered
        job.tell(Ended(number, stats), at_once=True)  # the next one begins with a prompt, which takes a while


def chat(request: ChatRequest, owner: str = "") -> Asked:
    likely = (request.top_logprobs or 0) if request.logprobs else None
    return Asked(request, lambda session: prepare_chat(session, request), request.most, likely, owner)


def completion(request: CompletionRequest, owner: str = "") -> Asked:
    return Asked(request, lambda session: prepare_completion(session, request), request.most, request.logprobs, owner)


def _drafts(request: Sampling, corpora: Corpora) -> bool | Mapping[str, Any] | None:
    """The `racer` argument of an answer."""
    options = request.racer
    if not isinstance(options, RacerOptions):
        return options
    names = ("draft", "max_nodes", "exact")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.corpora is not None:
        given["corpora"] = corpora(options.corpora)
    return given


def prepare_chat(session: Session, request: ChatRequest) -> Prepared:
    """The prompt of a chat, and the grammar that its answer keeps to where a schema or a call is asked for."""
    choice, form = request.tool_choice or ("auto" if request.tools else "none"), request.response_format
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or []] if choice != "none" else []
    messages = [message.plain() for message in request.messages]
    prompt = render_chat(session.model, messages, tools, n_ctx=session.target.n_ctx)
    constrained = form is not None and form.type != "text"
    if choice in ("none", "auto"):
        grammar = None
        if constrained and form is not None:
            schema = form.json_schema.schema_ if form.json_schema else None
            grammar = grammar_of(ANY_OBJECT if schema is None else schema)
        style = Style.of(session.model.chat_template or "") if tools else None
        return Prepared([prompt], grammar, style=style)
    if constrained:
        raise ConfigError("an answer can't be a call and of a response_format at once; leave out one of them")
    if isinstance(choice, ToolChoice):
        tools = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
    style = Style.of(session.model.chat_template or "")
    grammar = grammar_of(style.schema(tools))
    if style.begin:
        prompt += session.model.tokenize(f"{style.begin}\n", parse_special=True)
        grammar = wrapped(grammar, "", f"\n{style.end}")
    return Prepared([prompt], grammar, style=style, inside_call=True)


def prepare_completion(session: Session, request: CompletionRequest) -> Prepared:
    """Prompts of a completion: texts, or token ids as they are."""
    model, prompt = session.model, request.prompt

    def tokens_of(text: str) -> list[int]:
        check_length(model, session.target.n_ctx, [text])
        return model.tokenize(text, add_special=True, parse_special=request.parse_special)

    def text_of_ids(tokens: Sequence[int]) -> str:
        return text_of(b"".join(map(model.piece, tokens)))

    if request.suffix is not None:
        if model.infill is None:
            raise ConfigError("this model was not trained to fill in; leave out suffix, or name another model")
        before, behind, middle = model.infill
        check_length(model, session.target.n_ctx, [str(prompt), request.suffix])
        tokens = [before, *model.tokenize(str(prompt)), behind, *model.tokenize(request.suffix), middle]
        return Prepared([tokens], echoes=[str(prompt)] if request.echo else ())
    prompts = [tokens_of(each) if isinstance(each, str) else each for each in _listed(request)]
    echoes = [each if isinstance(each, str) else text_of_ids(each) for each in _listed(request)] if request.echo else ()
    return Prepared(prompts, echoes=echoes)


def check_limits(request: Sampling, most: int | None, config: ServerConfig) -> None:
    """Raises ApiError where more is asked for than the server gives to one request."""
    prompts = len(_listed(request)) if isinstance(request, CompletionRequest) else 1
    if (answers := prompts * (request.n or 1)) > config.max_n:
        what = f"{answers} answers are asked for (prompts times n)" if prompts > 1 else f"n is {answers}"
        raise ApiError(400, f"{what}; this server gives up to {config.max_n} (--max-n)", param="n")
    if most is not None and most > config.most_tokens:
        allowed = f"this server allows up to {config.most_tokens} (--limit-tokens)"
        raise ApiError(400, f"max_tokens is {most}; {allowed}", param="max_tokens")


def _listed(request: CompletionRequest) -> list[Any]:
    """A completion's prompts."""
    prompt = request.prompt
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
