"""What drafting costs a step, without a model: propose, top-k, observe, accept. And does it grow with the history?"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from racer_local.config import DraftConfig
from racer_local.cost import VerifyCost
from racer_local.draft import Drafter, TopK, make_drafter
from racer_local.tree import DraftTree, Int32s, Limit

PHRASE = 12
CHUNK = 8192
"""Tokens of one prompt of the history."""
PHASES = ("draft", "top_k", "observe", "accept", "total")


def repetitive_text(rng: np.random.Generator, n: int, n_vocab: int) -> Int32s:
    """[n] tokens, Zipf-like, a third of them phrases that came before: many matches, full tries."""
    text: list[int] = []
    while len(text) < n:
        if text and rng.random() < 1 / 3:
            start = int(rng.integers(len(text)))
            text += text[start : start + PHRASE]
        else:
            text += (rng.zipf(1.3, PHRASE) % n_vocab).tolist()
    return np.array(text[:n], np.int32)


def measure(
    draft: str, nodes: int, n_vocab: int, context: int, history: int, steps: int, seed: int = 0
) -> dict[str, Any]:
    """Times of each phase in milliseconds a step (median and 99th percentile) and their sum.

    The drafter has read `history` tokens of earlier prompts and stands in a prompt of `context` tokens. Verifying
    is free here, so `racer` too fills its trees.
    """
    rng = np.random.default_rng(seed)
    config = DraftConfig(draft=draft, max_nodes=nodes)
    drafter = make_drafter(config, n_vocab, (), VerifyCost.parse("1:1"))
    text = repetitive_text(rng, context + CHUNK, n_vocab)
    _read(drafter, rng, history, n_vocab)
    drafter.begin(text[:context])
    _observe(drafter, rng, text[: min(context, CHUNK)], n_vocab)
    logits = rng.normal(size=(nodes, n_vocab)).astype(np.float32)
    times: dict[str, list[float]] = {phase: [] for phase in PHASES}
    drafted = []
    for i in range(steps):
        root, follower = int(text[context - 1 + i % CHUNK]), int(text[context + i % CHUNK])
        marks = [perf_counter()]
        tree = drafter.draft(root, Limit(nodes, nodes, context))
        marks.append(perf_counter())
        top_k = TopK.of(logits[: len(tree)], drafter.breadth) if drafter.breadth else TopK.none()
        marks.append(perf_counter())
        drafter.observe(tree, top_k)
        marks.append(perf_counter())
        drafter.accept([0], follower)
        marks.append(perf_counter())
        drafted.append(len(tree))
        for phase, start, end in zip(PHASES, marks, marks[1:], strict=False):
            times[phase].append(1e3 * (end - start))
        times["total"].append(1e3 * (marks[-1] - marks[0]))
    return {
        "draft": draft,
        "nodes": nodes,
        "mean_nodes": round(float(np.mean(drafted)), 1),
        "breadth": drafter.breadth,
        "n_vocab": n_vocab,
        "context": context,
        "history": history,
        "steps": steps,
        "milliseconds": {
            phase: {"median": round(float(np.median(t)), 4), "p99": round(float(np.quantile(t, 0.99)), 4)}
            for phase, t in times.items()
        },
    }


def _read(drafter: Drafter, rng: np.random.Generator, history: int, n_vocab: int) -> None:
    for start in range(0, history, CHUNK):
        prompt = repetitive_text(rng, min(CHUNK, history - start), n_vocab)
        drafter.begin(prompt)
        _observe(drafter, rng, prompt, n_vocab)


def _observe(drafter: Drafter, rng: np.random.Generator, tokens: Int32s, n_vocab: int) -> None:
    """What a model might think of a prompt: the token that came, and others."""
    if drafter.breadth and len(tokens) > 1:
        ids = (rng.zipf(1.3, (len(tokens) - 1, drafter.breadth)) % n_vocab).astype(np.int32)
        ids[:, 0] = tokens[1:]
        logits = -np.sort(rng.exponential(2.0, ids.shape), axis=1)
        drafter.observe(DraftTree.chain(tokens[:-1]), TopK(ids, logits.astype(np.float32)))
