"""Drafters by name, and prompts: what the benches that ask a model share."""

from __future__ import annotations

from collections.abc import Sequence

from racer_local.bench.data import Question
from racer_local.config import DraftConfig
from racer_local.errors import ConfigError
from racer_local.llama import Model, render_chat
from racer_local.tools import Message

EXACT, CORPUS = "+exact", "+corpus"
WARM_UP_PROMPT, WARM_UP_TOKENS = "Count from one to ten, twice.", 32


def parse_draft(spec: str, corpora: Sequence[str] = ()) -> DraftConfig:
    """A drafter by name; NAME@N within N nodes, NAME+corpus with indexes, NAME+exact as plain decoding to the bit."""
    name, *more = spec.strip().split("+")
    name, at, nodes = name.partition("@")
    if at and not (nodes.isascii() and nodes.isdecimal()):
        raise ConfigError(f"{spec!r} must be a drafter, or a drafter and its nodes like paper@16")
    if unknown := {f"+{what}" for what in more} - {EXACT, CORPUS}:
        raise ConfigError(f"{spec!r} ends in {', '.join(sorted(unknown))}; what can be is {CORPUS} and {EXACT}")
    if CORPUS[1:] in more and not corpora:
        raise ConfigError(f"{spec!r} needs an index; name it with --corpus")
    return DraftConfig(
        draft=name,
        max_nodes=int(nodes) if at else None,
        exact=EXACT[1:] in more,
        corpora=tuple(corpora) if CORPUS[1:] in more else (),
    )


def as_prompt(model: Model, messages: list[Message]) -> list[int]:
    """The chat's tokens; for a model without a chat template those of its texts, one behind the other."""
    if model.chat_template:
        return render_chat(model, messages)
    return model.tokenize("\n\n".join(message["content"] for message in messages), add_special=True)


def in_context(model: Model, questions: Sequence[Question], sizes: Sequence[int]) -> list[Question]:
    """The first turns behind text of other questions, so that each is about as many tokens long as `sizes` say.

    A category for each size. Questions that are longer by themselves are left out there.
    """
    texts = [question.turns[0] for question in questions]
    found: list[Question] = []
    for size in sizes:
        for i, text in enumerate(texts):
            room = size - len(model.tokenize(text))
            before = model.tokenize("\n\n".join(texts[i + 1 :] + texts[:i]))[: max(0, room)]
            if room >= 0 and len(before) == room:
                notes = b"".join(map(model.piece, before)).decode("utf-8", "ignore")
                found.append(Question(f"{size} tokens", [f"{notes}\n\n{text}"], str(i)))
    return found
