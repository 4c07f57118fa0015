"""The loop: draft, verify, accept. It knows token ids, one Target, one Drafter and one Sampler, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from racer_local.config import MAX_NODES
from racer_local.draft import Drafter, TopK
from racer_local.errors import ConfigError, ContextFullError
from racer_local.stats import GenerationStats
from racer_local.target import Rows, Sampler, Target, never
from racer_local.tree import DraftTree, Limit, NodeIds, Source, Tokens
from racer_local.verify import verify


class Emitted(NamedTuple):
    """One token of the answer. `logits` is the row it was drawn from, valid until the next token is asked for."""

    token: int
    logits: NDArray[np.float32]
    source: Source = Source.ROOT
    """Which source drafted it; ROOT: none, it is the bonus token that ends a step."""


def generate(
    target: Target,
    drafter: Drafter,
    sampler: Sampler,
    prompt: Tokens,
    *,
    max_tokens: int,
    end_tokens: Collection[int],
    max_nodes: int = MAX_NODES,
    learns_from_prompt: bool = True,
    stats: GenerationStats | None = None,
    cancelled: Callable[[], bool] = never,
) -> Generator[Emitted, None, None]:
    """Answer `prompt`, token by token, until an end token (not emitted), `max_tokens` or a full context.

    Plain decoding is this loop with a drafter that drafts nothing. Closing the iterator early is safe: the
    cache then holds the prompt and what was emitted, less the last token, which is the next root. No tree has more
    than `max_nodes` nodes. `learns_from_prompt`: the drafter is shown the prompt's logits if it wants them, for which
    the prompt is read in smaller batches.

    Raises ContextFullError when the prompt leaves no room for a token, ConfigError when it is empty.
    """
    stats = GenerationStats() if stats is None else stats
    left, nodes = min(max_tokens, _room(target, prompt)), min(max_nodes, target.max_nodes)
    stop = never if cancelled is never else Sticky(cancelled)
    if left > 0:
        _prefill(target, drafter, sampler, prompt, learns_from_prompt and nodes > 1, stats, stop)
    root, stats.finish_reason = int(prompt[-1]), "length"

    while left > 0 and stats.finish_reason == "length":
        if stop():
            stats.finish_reason = "cancelled"
            return
        with stats.timing("decode_seconds", "draft_seconds"):
            tree = drafter.draft(root, Limit(nodes, target.max_leaves, depth=left - 1))
        kept: NodeIds = []
        try:
            with stats.timing("decode_seconds"):
                with stats.timing("verify_seconds"):
                    rows = target.evaluate(tree)
                path, bonus = verify(tree, lambda node, rows=rows: sampler.draw(rows[node]))  # type: ignore[misc]
                with stats.timing("draft_seconds"):
                    if drafter.breadth:
                        drafter.observe(tree, TopK.of(rows, drafter.breadth))
            answer = [*tree.tokens[path[1:]].tolist(), bonus][:left]
            sources = [*tree.sources[path[1:]].tolist(), Source.ROOT]
            for node, root, source in zip(path, answer, sources, strict=False):
                kept.append(node)
                if root in end_tokens:
                    stats.finish_reason = "stop"
                    break
                left -= 1
                stats.emitted += 1
                yield Emitted(root, rows[node], Source(source))
        finally:
            with stats.timing("decode_seconds"):
                with stats.timing("verify_seconds"):
                    target.commit(kept)
                stats.count_step(tree, kept)
                if kept:
                    with stats.timing("draft_seconds"):
                        drafter.accept(kept, root)


class Sticky:
    """Once cancelled, cancelled for good: the loop must not go on over a half-filled cache."""

    def __init__(self, cancelled: Callable[[], bool]) -> None:
        self._cancelled, self._stopped = cancelled, False

    def __call__(self) -> bool:
        self._stopped = self._stopped or self._cancelled()
        return self._stopped


def _room(target: Target, prompt: Tokens) -> int:
    """Tokens that still fit behind the prompt, at least 1."""
    if not len(prompt):
        raise ConfigError("the prompt is empty; give it at least one token")
    if len(prompt) >= target.n_ctx:
        raise ContextFullError(
            f"the prompt has {len(prompt)} tokens and the context holds {target.n_ctx}, which leaves no room "
            f"for an answer; open it with n_ctx (--ctx) above {len(prompt)} or shorten the prompt"
        )
    ids = np.asarray(prompt)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ConfigError("the prompt must be a flat sequence of token ids (integers); tokenize text first")
    if ids.min() < 0 or ids.max() >= target.n_vocab:
        wrong = ids[(ids < 0) | (ids >= target.n_vocab)][0]
        raise ConfigError(f"token {wrong} of the prompt is not in the vocabulary (0 to {target.n_vocab - 1})")
    return target.n_ctx - len(prompt)


def _prefill(
    target: Target,
    drafter: Drafter,
    sampler: Sampler,
    prompt: Tokens,
    learns: bool,
    stats: GenerationStats,
    cancelled: Callable[[], bool],
) -> None:
    """Put all but the last prompt token into the cache; that one is the root of the first tree."""

    def learn(tokens: Tokens, rows: Rows) -> None:
        drafter.observe(DraftTree.chain(tokens), TopK.of(rows, drafter.breadth))

    stats.prompt_tokens = len(prompt)
    with stats.timing("prefill_seconds"):
        sampler.begin(prompt)
        drafter.begin(prompt)
        on_rows = learn if learns and drafter.breadth else None
        stats.cached_tokens = target.prefill(prompt[:-1], on_rows, cancelled, drafter.prompt_rows)
