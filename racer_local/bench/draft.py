"""What drafting costs a step, without a model: propose, top-k, observe, accept."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np

from racer_local.config import DraftConfig
from racer_local.draft import TopK, make_drafter
from racer_local.kernels import warm_up
from racer_local.tree import Int32s, Limit

PHRASE = 12


def repetitive_text(rng: np.random.Generator, n: int, n_vocab: int) -> Int32s:
    """[n] tokens, Zipf-like, a third of them phrases that came before: many borders, full tries."""
    text: list[int] = []
    while len(text) < n:
        if text and rng.random() < 1 / 3:
            start = int(rng.integers(len(text)))
            text += text[start : start + PHRASE]
        else:
            text += (rng.zipf(1.3, PHRASE) % n_vocab).tolist()
    return np.array(text[:n], np.int32)


def measure(nodes: int, n_vocab: int, context: int, steps: int, seed: int = 0) -> dict[str, Any]:
    """Times of each phase in milliseconds a step (median and 99th percentile) and their sum."""
    rng = np.random.default_rng(seed)
    warm_up()
    config = DraftConfig(draft="paper", max_nodes=nodes)
    drafter = make_drafter(config, n_vocab)
    drafter.begin(repetitive_text(rng, context, n_vocab))
    logits = rng.normal(size=(nodes, n_vocab)).astype(np.float32)
    times: dict[str, list[float]] = {"draft": [], "top_k": [], "observe": [], "accept": [], "total": []}
    drafted = []
    for root in _roots(rng, steps, n_vocab):
        marks = [perf_counter()]
        tree = drafter.draft(root, Limit(nodes, nodes, context))
        marks.append(perf_counter())
        top_k = TopK.of(logits[: len(tree)], drafter.breadth)
        marks.append(perf_counter())
        drafter.observe(tree, top_k)
        marks.append(perf_counter())
        drafter.accept([0], root)
        marks.append(perf_counter())
        drafted.append(len(tree))
        for name, start, end in zip(times, marks, marks[1:], strict=False):
            times[name].append(1e3 * (end - start))
        times["total"].append(1e3 * (marks[-1] - marks[0]))
    return {
        "nodes": nodes,
        "mean_nodes": round(float(np.mean(drafted)), 1),
        "breadth": drafter.breadth,
        "n_vocab": n_vocab,
        "context": context,
        "steps": steps,
        "milliseconds": {
            name: {"median": round(float(np.median(t)), 4), "p99": round(float(np.quantile(t, 0.99)), 4)}
            for name, t in times.items()
        },
    }


def _roots(rng: np.random.Generator, steps: int, n_vocab: int) -> Iterator[int]:
    # Frequent tokens, so that the cue table answers and the tree fills up.
    for token in rng.zipf(1.3, steps) % n_vocab:
        yield int(token)
