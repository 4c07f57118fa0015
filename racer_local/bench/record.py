"""Record a model's answers: tokens, and the likeliest next tokens after each of them, for `bench replay`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from racer_local.bench.data import Question
from racer_local.bench.trace import Trace
from racer_local.config import ContextConfig, SamplingConfig
from racer_local.draft import TopK
from racer_local.draft.none import NoDrafter
from racer_local.engine import generate
from racer_local.errors import ContextFullError
from racer_local.llama import LlamaTarget, Model, make_sampler, render_chat
from racer_local.target import OnRows, Rows, Target, never
from racer_local.tree import DraftTree, Int32s, NodeIds, Tokens

WIDTH = 8
"""Likeliest next tokens kept of each row."""


class ListeningTarget:
    """Another target, decoding plainly; what it thinks after each token of the text is noted."""

    max_nodes = max_leaves = 1

    def __init__(self, target: Target) -> None:
        self._target = target
        self.n_vocab, self.n_ctx = target.n_vocab, target.n_ctx
        self.ids: list[Int32s] = []
        """[WIDTH] for each evaluated token."""
        self.probs: list[NDArray[np.float16]] = []

    def prefill(
        self,
        tokens: Tokens,
        on_rows: OnRows | None = None,
        cancelled: Callable[[], bool] = never,
        last: int | None = None,
    ) -> int:
        return self._target.prefill(tokens, lambda _, rows: self._note(rows), cancelled)

    def evaluate(self, tree: DraftTree) -> Rows:
        rows = self._target.evaluate(tree)
        self._note(rows)
        return rows

    def commit(self, path: NodeIds) -> None:
        self._target.commit(path)

    def _note(self, rows: Rows) -> None:
        top = TopK.of(rows, WIDTH)
        likeliest = top.logits[:, :1]
        sums = np.exp(rows - likeliest).sum(axis=1, keepdims=True)
        self.ids.extend(top.ids)
        self.probs.extend((np.exp(top.logits - likeliest) / sums).astype(np.float16))


@dataclass
class Conversation:
    category: str
    target: ListeningTarget
    tokens: list[int] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)
    """(start, end) of each in `tokens`."""


def record(
    model: Model, questions: Sequence[Question], context: ContextConfig, max_tokens: int
) -> Iterator[list[Conversation]]:
    """Greedy answers to each question, one after the other; none where a prompt does not fit into the context."""
    with LlamaTarget(model, context, max_nodes=2) as target:  # 2: prompts come in chunks of rows
        for question in questions:
            try:
                yield _ask(target, model, question, max_tokens)
            except ContextFullError:
                yield []


def _ask(target: Target, model: Model, question: Question, max_tokens: int) -> list[Conversation]:
    """All turns of a question: one conversation.

    Where a later prompt does not begin with what was said (some chat templates drop parts of earlier answers), a
    new conversation begins.
    """
    messages: list[dict[str, str]] = []
    conversations: list[Conversation] = []
    for turn in question.turns:
        messages.append({"role": "user", "content": turn})
        prompt = render_chat(model, messages)
        if not conversations or prompt[: len(conversations[-1].tokens)] != conversations[-1].tokens:
            target.prefill([])
            conversations.append(Conversation(question.category, ListeningTarget(target)))
        answer = _answer(model, conversations[-1], prompt, max_tokens)
        text = b"".join(map(model.piece, answer)).decode("utf-8", "replace")
        messages.append({"role": "assistant", "content": text})
    return conversations


def _answer(model: Model, conversation: Conversation, prompt: list[int], max_tokens: int) -> list[int]:
    sampler = make_sampler(SamplingConfig(), model.n_vocab)
    ends = model.end_tokens
    stream = generate(conversation.target, NoDrafter(), sampler, prompt, max_tokens=max_tokens, end_tokens=ends)
    answer = [emitted.token for emitted in stream]
    conversation.tokens = [*prompt, *answer]
    conversation.answers.append((len(prompt), len(conversation.tokens)))
    return answer


def to_trace(conversations: Sequence[Conversation]) -> Trace:
    """All of them end to end."""
    lengths = [len(conversation.tokens) for conversation in conversations]
    ids = np.full((sum(lengths), WIDTH), -1, np.int32)
    probs = np.zeros((sum(lengths), WIDTH), np.float16)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    for conversation, start in zip(conversations, offsets.tolist(), strict=False):
        n = len(conversation.target.ids)  # the last token of an answer cut short was not evaluated
        ids[start : start + n], probs[start : start + n] = conversation.target.ids, conversation.target.probs
    return Trace(
        tokens=np.array([token for c in conversations for token in c.tokens], np.int32),
        offsets=offsets,
        topk_ids=ids,
        topk_probs=probs,
        gen=np.array([(i, *span) for i, c in enumerate(conversations) for span in c.answers], np.int32).reshape(-1, 3),
        category=np.array([conversation.category for conversation in conversations]),
    )
