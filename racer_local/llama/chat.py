"""From messages to prompt tokens, by the chat template that the GGUF carries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from racer_local.errors import ConfigError, ContextFullError, ModelError
from racer_local.llama.model import Model
from racer_local.tools import Message, Style, Tool


def render_chat(
    model: Model, messages: Sequence[Message], tools: Sequence[Tool] = (), *, n_ctx: int | None = None
) -> list[int]:
    """Prompt tokens of a chat, the assistant's turn opened, by the binding's own Jinja rendering.

    Messages are OpenAI's, with a text or parts of text as content; so are tools. A control token's spelling in
    either stays text: they are rendered with a mark inside each such spelling, and the prompt is cut there before
    it is tokenized.

    Raises ModelError where the file carries no template or the template refuses the messages, ConfigError for a
    message without text, ContextFullError for texts that no n_ctx tokens can hold, before they are looked through.
    """
    if not model.chat_template:
        raise ModelError(f"{model.path.name} carries no chat template; use the raw prompt (--raw)")
    style = Style.of(model.chat_template)
    written = style.written([_with_text(message) for message in messages], tools)
    if n_ctx is not None:
        check_length(model, n_ctx, _strings([written, tools]))
    mark = _unused_character(_strings([written, tools]))

    def marked(value: Any) -> Any:
        return _map_strings(value, lambda text: _break_control_tokens(model, text, mark))

    first, *others = _render(model, marked(written), marked(list(tools)) if style.native else []).split(mark)
    if n_ctx is not None and len(others) >= n_ctx:
        raise ContextFullError(
            f"the prompt has more than {len(others)} tokens and the context holds {n_ctx}; shorten it"
        )
    tokens = model.tokenize(first, parse_special=True)
    for part in others:
        tokens += tokenize_inside(model, part)
    return tokens


def check_length(model: Model, n_ctx: int, texts: Iterable[str]) -> None:
    """Raises ContextFullError for texts that are too long even if each token were the vocabulary's longest."""
    characters = sum(map(len, texts))
    if characters >= n_ctx * model.longest_piece:
        raise ContextFullError(
            f"the prompt has {characters} characters, which the context of {n_ctx} tokens can't hold; open it with a "
            f"larger n_ctx (--ctx) or shorten the prompt"
        )


def _with_text(message: Message) -> dict[str, Any]:
    """A message whose content is one text. Raises ConfigError where it has none."""
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None  # type: ignore[arg-type]
    elif content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise ConfigError(f"a chat message must have text as its content; this one has not: {message}")
    return {**message, "content": content}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from chain(_strings(key), _strings(inner))
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _strings(inner)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The value with each text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): _map_strings(inner, change) for name, inner in value.items()}
    if isinstance(value, Sequence):
        return [_map_strings(inner, change) for inner in value]
    return value


def mark_control_tokens(model: Model, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The messages with a mark inside each spelling of a control token, and the mark: a character they don't hold.

    A message's content is a text or a list of parts, of which those with a "text" are looked at.
    """
    mark = _unused_character(text for message in messages for text in _texts(message))
    return [_with_texts(message, lambda text: _break_control_tokens(model, text, mark)) for message in messages], mark


def tokenize_inside(model: Model, part: str) -> list[int]:
    """Tokens of a part that goes on in the middle of a word; some vocabularies would put a space before it."""
    ahead = model.tokenize("\n")
    tokens = model.tokenize("\n" + part, parse_special=True)
    return tokens[len(ahead) :] if tokens[: len(ahead)] == ahead else model.tokenize(part, parse_special=True)


@lru_cache(maxsize=8)
def _formatter(template: str, eos: str, bos: str) -> Any:
    """Compiled once: that takes longer than to render a chat."""
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    return Jinja2ChatFormatter(template, eos_token=eos, bos_token=bos)


def _render(model: Model, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
    try:
        formatter = _formatter(model.chat_template or "", model.eos, model.bos)
        return str(formatter(messages=messages, tools=list(tools) or None).prompt)
    except Exception as error:  # templates raise whatever their author chose
        raise ModelError(
            f"the chat template of {model.path.name} refuses these messages ({error}); change them or use --raw"
        ) from error


def _break_control_tokens(model: Model, text: str, mark: str) -> str:
    """`text` with `mark` inside each control token's spelling, so that no part of it is one."""
    while True:
        tokens = model.tokenize(text, parse_special=True)
        if tokens == model.tokenize(text):
            return text
        spellings = {model.piece(t, special=True).decode("utf-8", "replace") for t in tokens if model.is_special(t)}
        broken = text
        for spelling in (s for s in spellings if len(s) > 1):
            broken = broken.replace(spelling, spelling[:1] + mark + spelling[1:])
        if broken == text:
            return text
        text = broken


def _unused_character(texts: Iterable[str]) -> str:
    """A private-use character that no text holds."""
    used = set("".join(texts))
    private = chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
    return next(c for c in map(chr, private) if c not in used)


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    return [str(part["text"]) for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]


def _with_texts(message: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    def changed(part: Any) -> Any:
        has_text = isinstance(part, Mapping) and isinstance(part.get("text"), str)
        return {**part, "text": change(part["text"])} if has_text else part

    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": change(content)}
    return {**message, **({"content": [changed(part) for part in content]} if isinstance(content, list) else {})}
