"""Replay recorded answers through a drafter: what would it have drafted, and what would that have cost?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from racer_local.bench.trace import Trace
from racer_local.cost import VerifyCost
from racer_local.draft import Drafter, TopK
from racer_local.tree import DraftTree, Int32s, Limit
from racer_local.verify import verify


@dataclass
class ReplayCounts:
    """Raw sums of some answers. Times are in forwards of one token."""

    tokens: int = 0
    steps: int = 0
    nodes: int = 0
    """Of the verified trees, roots counted."""
    seconds: float = 0.0

    def add(self, other: ReplayCounts) -> None:
        self.tokens += other.tokens
        self.steps += other.steps
        self.nodes += other.nodes
        self.seconds += other.seconds

    def as_dict(self) -> dict[str, Any]:
        """mat: tokens a step; speedup: over plain decoding, which takes one forward a token; mean_nodes a step."""
        return {
            "mat": round(self.tokens / self.steps, 4) if self.steps else 0.0,
            "speedup": round(self.tokens / self.seconds, 4) if self.seconds else 0.0,
            "mean_nodes": round(self.nodes / self.steps, 3) if self.steps else 0.0,
        }


def replay(trace: Trace, drafter: Drafter, cost: VerifyCost, most_nodes: int) -> Iterator[tuple[str, ReplayCounts]]:
    """Each answer's category and counts; the drafter keeps what it learned from one to the next.

    The root is the last recorded token; of the drafted tree the path that agrees with the recording is accepted.
    Only tokens on that path have logits, so a drafter that learns from rejected nodes is judged a little low.
    """
    for conversation, start, end in trace.answers():
        first, last = trace.offsets[conversation], trace.offsets[conversation + 1]
        tokens, rows = trace.tokens[first:last], rows_of(trace, slice(first, last))
        counts = ReplayCounts()
        prefill(drafter, tokens[:start], rows)
        at = start
        while at < end:
            at += _step(drafter, cost, tokens[:end], rows, at, most_nodes, counts)
        yield str(trace.category[conversation]), counts


def summary(answers: Iterable[tuple[str, ReplayCounts]]) -> dict[str, Any]:
    """{"categories": {NAME: figures}, "total": figures} of a replay."""
    categories: dict[str, ReplayCounts] = {}
    total = ReplayCounts()
    for category, counts in answers:
        categories.setdefault(category, ReplayCounts()).add(counts)
        total.add(counts)
    return {"categories": {name: counts.as_dict() for name, counts in categories.items()}, "total": total.as_dict()}


def rows_of(trace: Trace, span: slice) -> TopK:
    with np.errstate(divide="ignore"):
        return TopK(trace.topk_ids[span], np.log(trace.topk_probs[span].astype(np.float32)))


def prefill(drafter: Drafter, prompt: Int32s, rows: TopK) -> None:
    drafter.begin(prompt)
    end = len(prompt) - 1
    start = 0 if drafter.prompt_rows is None else max(0, end - drafter.prompt_rows)
    if drafter.breadth and start < end:
        drafter.observe(DraftTree.chain(prompt[start:end]), first_rows(rows, start, end, drafter.breadth))


def first_rows(rows: TopK, start: int, end: int, k: int) -> TopK:
    """The rows of these tokens, k wide; what was not recorded is -1."""
    top_k = unknown_rows(end - start, k)
    known = min(k, rows.ids.shape[1])
    top_k.ids[:, :known], top_k.logits[:, :known] = rows.ids[start:end, :known], rows.logits[start:end, :known]
    return top_k


def unknown_rows(n: int, k: int) -> TopK:
    return TopK(np.full((n, k), -1, np.int32), np.full((n, k), -np.inf, np.float32))


def _step(
    drafter: Drafter, cost: VerifyCost, tokens: Int32s, rows: TopK, at: int, most_nodes: int, counts: ReplayCounts
) -> int:
    """One draft behind tokens[:at]; returns how many tokens were emitted."""
    left = len(tokens) - at
    tree = drafter.draft(int(tokens[at - 1]), Limit(most_nodes, most_nodes, left - 1))
    path, bonus = verify(tree, lambda node: int(tokens[at + tree.depths[node]]))
    if drafter.breadth:
        known = first_rows(rows, at - 1, at - 1 + len(path), drafter.breadth)
        top_k = unknown_rows(len(tree), drafter.breadth)
        top_k.ids[path], top_k.logits[path] = known.ids, known.logits
        drafter.observe(tree, top_k)
    drafter.accept(path, bonus)
    counts.tokens += len(path)
    counts.steps += 1
    counts.nodes += len(tree)
    counts.seconds += float(cost.relative[len(tree)])
    return len(path)
