"""Fit the prior of `racer_local.acceptance` to recorded answers: evidence of each context, and what came next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from racer_local.bench.replay import first_rows, prefill, rows_of
from racer_local.bench.trace import Trace
from racer_local.config import DraftConfig
from racer_local.corpus.corpora import Corpora
from racer_local.corpus.index import remember
from racer_local.corpus.store import Store
from racer_local.cost import VerifyCost
from racer_local.draft.racer import RacerDrafter
from racer_local.errors import ConfigError
from racer_local.kernels import evidence, growth
from racer_local.kernels.acceptance import Net, new_net
from racer_local.kernels.evidence import CORPUS_NODE_AT, CORPUS_TOKEN_AT, NODE_FEATURES, TOKEN_FEATURES
from racer_local.tree import Int32s, Limit

DEPTHS = (0, 1, 2, 4, 8)
"""Contexts looked at behind each root: so far along the true path, which a tree would have drafted."""
HIDDEN = 32
EPOCHS = 16
BATCH = 512
"""Contexts of one gradient step."""
RATE = 3e-3
BETAS = 0.9, 0.999
STILL = np.float32(1e-3)
"""What is added to each feature's standard deviation."""

WEIGHTS = "node_weights", "token_weights", "bias", "prior"

Floats = NDArray[np.float32]
Weights = dict[str, Floats]


@dataclass
class Examples:
    """G contexts with S candidates in all."""

    node: Floats
    """[G, node features]"""
    token: Floats
    """[S, token features]"""
    sizes: NDArray[np.int64]
    """[G] candidates of each context."""
    came: Floats
    """[S] 1 for the candidate that came next."""

    @classmethod
    def join(cls, parts: Sequence[Examples]) -> Examples:
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("node", "token", "sizes", "came")))

    def take(self, contexts: NDArray[np.int64]) -> Examples:
        starts = (np.cumsum(self.sizes) - self.sizes)[contexts]
        sizes = self.sizes[contexts]
        rows = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())
        return Examples(self.node[contexts], self.token[rows], sizes, self.came[rows])


def collect(trace: Trace, *, keep: bool, corpora: Sequence[Corpora] = ()) -> Examples:
    """What a drafter that walks the recorded answers knows at each token.

    keep: its memory lasts from one answer to the next, else each one starts with an empty memory. corpora: the
    indexes beside each conversation, if any.

    Raises ConfigError where there is nothing to learn from.
    """
    banned = np.zeros(trace.n_vocab, np.bool_)
    drafter = RacerDrafter(DraftConfig(), banned, VerifyCost.parse("1:1"), empty_net())
    parts: list[Examples] = []
    for conversation, start, end in trace.answers():
        first, last = trace.offsets[conversation], trace.offsets[conversation + 1]
        if not keep:
            drafter.clear()
        if corpora:
            drafter.use(corpora[conversation])
        tokens, rows = trace.tokens[first:last], rows_of(trace, slice(first, last))
        prefill(drafter, tokens[:start], rows)
        for at in range(start, end):
            parts += _contexts(drafter, tokens[:end], at)
            tree = drafter.draft(int(tokens[at - 1]), Limit(1, 1, 0))
            drafter.observe(tree, first_rows(rows, at - 1, at, drafter.breadth))
            drafter.accept([0], int(tokens[at]))
    if not parts:
        raise ConfigError("the trace has nothing to learn from: no answer, or no token with likeliest next tokens")
    return Examples.join(parts)


def _contexts(drafter: RacerDrafter, tokens: NDArray[np.int32], at: int) -> Iterator[Examples]:
    history, cues, recent, found, _, index = drafter.memory
    for depth in (depth for depth in DEPTHS if at + depth < len(tokens)):
        growth.set_context(found.context, tokens[: at + depth], tokens, tokens, 0)
        size = evidence.gather(history, cues, recent, found, index, depth)
        if size:
            came = (found.tokens[:size] == tokens[at + depth]).astype(np.float32)
            yield Examples(found.node[None].copy(), found.features[:size].copy(), np.array([size]), came)


def empty_net() -> Net:
    """A network that knows nothing."""
    shapes = (len(NODE_FEATURES), 1), (len(TOKEN_FEATURES), 1), (1,), (2,)
    return new_net(*(np.zeros(shape, np.float32) for shape in shapes))


def surprise(net: Net, examples: Examples) -> float:
    """Mean negative log probability, in nats a context, of the candidate that came or of "none of them"."""
    weights = {name: getattr(net, name) for name in WEIGHTS}
    p, none, _ = _forward(weights, examples)
    starts = np.cumsum(examples.sizes) - examples.sizes
    came = np.add.reduceat(examples.came, starts)
    hit = np.add.reduceat(p * examples.came, starts)
    return float(-np.log(np.maximum(np.where(came > 0, hit, none), 1e-9)).mean())


def indexes_beside(trace: Trace, folder: Path, background: Path, seed: int = 0) -> list[Corpora]:
    """For each conversation the indexes that a user may have beside it: what a fit of their evidence learns from.

    Each has some other conversations; every second one a part of its own answers too, as an earlier version (every
    thirtieth token or so begins a change); every second one the large index `background`.
    """
    rng, indexes = np.random.default_rng(seed), []
    vocabulary = Store(background).vocabulary
    texts = [trace.tokens[a:b] for a, b in pairwise(trace.offsets.tolist())]
    answers: list[list[Int32s]] = [[] for _ in texts]
    for conversation, start, end in trace.answers():
        answers[conversation].append(texts[conversation][start:end])
    for conversation, own in enumerate(answers):
        others = [i for i in rng.permutation(len(texts))[:12].tolist() if i != conversation]
        documents = [texts[i] for i in others]
        if rng.random() < 0.5:
            documents += [_earlier_version(rng, answer) for answer in own if len(answer) > 1]
        path = folder / f"{conversation}.index"
        remember(path, vocabulary, documents, ())
        indexes.append(Corpora([path, background] if rng.random() < 0.5 else [path], vocabulary))
    return indexes


def collect_with_indexes(traces: Iterable[tuple[Trace, Path]], folder: Path) -> Examples:
    """`collect` beside indexes, for traces with a large index each; what they need lies in `folder` meanwhile."""
    parts = []
    for number, (trace, background) in enumerate(traces):
        for keep in (True, False):
            own = folder / f"{number}-{keep}"
            own.mkdir()
            parts.append(collect(trace, keep=keep, corpora=indexes_beside(trace, own, background, seed=keep)))
    return Examples.join(parts)


def _earlier_version(rng: np.random.Generator, answer: Int32s) -> Int32s:
    first = int(rng.integers(len(answer) // 2 + 1))
    rest, version = answer[first:].tolist(), list[int]()
    while rest:
        if rng.random() < 1 / 30:
            version += rng.choice(answer, rng.integers(4)).tolist()
            rest = rest[rng.integers(4) :]
        else:
            version.append(rest.pop(0))
    return np.array(version, np.int32)


def fit_corpora(examples: Examples, start: Net, *, epochs: int = EPOCHS, seed: int = 0) -> Net:
    """`start` with the weights of what only indexes tell fitted anew; without an index nothing changes."""
    rng = np.random.default_rng(seed)
    weights = {name: getattr(start, name).copy() for name in WEIGHTS}
    weights["node_weights"][CORPUS_NODE_AT:] = 0
    weights["token_weights"][CORPUS_TOKEN_AT:] = 0
    free = {name: np.zeros_like(weight) for name, weight in weights.items()}
    free["node_weights"][CORPUS_NODE_AT:] = 1
    free["token_weights"][CORPUS_TOKEN_AT:] = 1
    _descend(weights, examples, rng, epochs, free)
    return new_net(*(weights[name] for name in WEIGHTS))


def fit(examples: Examples, *, hidden: int = HIDDEN, epochs: int = EPOCHS, seed: int = 0) -> Net:
    """The network that makes the examples least surprising: Adam, cosine learning rate, standardised features."""
    rng = np.random.default_rng(seed)
    scales = [(part.mean(axis=0), part.std(axis=0) + STILL) for part in (examples.node, examples.token)]
    node, token = (
        (part - mean) / scale for part, (mean, scale) in zip((examples.node, examples.token), scales, strict=True)
    )
    scaled = Examples(node, token, examples.sizes, examples.came)
    n_node, n_token = len(NODE_FEATURES), len(TOKEN_FEATURES)
    spread = (n_node + n_token) ** -0.5
    weights: Weights = {
        "node_weights": rng.normal(0, spread, (n_node, hidden)).astype(np.float32),
        "token_weights": rng.normal(0, spread, (n_token, hidden)).astype(np.float32),
        "bias": np.zeros(hidden, np.float32),
        "prior": np.append(rng.normal(0, 0.3 * hidden**-0.5, hidden), -3.0).astype(np.float32),
    }
    _descend(weights, scaled, rng, epochs)
    return _unscaled(weights, scales)


def _descend(
    weights: Weights, examples: Examples, rng: np.random.Generator, epochs: int, free: Weights | None = None
) -> None:
    """Adam on the weights that are 1 in `free`, by default all."""
    moments = {name: (np.zeros_like(w), np.zeros_like(w)) for name, w in weights.items()}
    contexts = len(examples.sizes)
    steps = epochs * -(-contexts // BATCH)
    step = 0
    for _ in range(epochs):
        order = rng.permutation(contexts)
        for start in range(0, contexts, BATCH):
            step += 1
            rate = RATE * 0.5 * (1 + np.cos(np.pi * step / steps)) + 1e-5
            gradient = _gradient(weights, examples.take(order[start : start + BATCH]))
            if free:
                gradient = {name: gradient[name] * free[name] for name in gradient}
            _adam(weights, gradient, moments, step, rate)


def _forward(weights: Weights, examples: Examples) -> tuple[Floats, Floats, Floats]:
    """Probabilities of the candidates [S] and of none [G], and the hidden layer [S, h]."""
    base = examples.node @ weights["node_weights"] + weights["bias"]
    hidden = np.maximum(np.repeat(base, examples.sizes, axis=0) + examples.token @ weights["token_weights"], 0)
    scores = hidden @ weights["prior"][:-1] + weights["prior"][-1]
    starts = np.cumsum(examples.sizes) - examples.sizes
    highest = np.maximum(np.maximum.reduceat(scores, starts), 0)
    p = np.exp(scores - np.repeat(highest, examples.sizes))
    total = np.add.reduceat(p, starts) + np.exp(-highest)
    return p / np.repeat(total, examples.sizes), np.exp(-highest) / total, hidden


def _gradient(weights: Weights, examples: Examples) -> Weights:
    p, _, hidden = _forward(weights, examples)
    error = (p - examples.came) / len(examples.sizes)
    back = np.outer(error, weights["prior"][:-1]) * (hidden > 0)
    per_context = np.add.reduceat(back, np.cumsum(examples.sizes) - examples.sizes)
    return {
        "node_weights": examples.node.T @ per_context,
        "token_weights": examples.token.T @ back,
        "bias": per_context.sum(axis=0),
        "prior": np.append(hidden.T @ error, error.sum()),
    }


def _adam(
    weights: Weights, gradient: Weights, moments: dict[str, tuple[Floats, Floats]], step: int, rate: float
) -> None:
    for name, weight in weights.items():
        mean, square = moments[name]
        mean += (1 - BETAS[0]) * (gradient[name] - mean)
        square += (1 - BETAS[1]) * (gradient[name] ** 2 - square)
        weight -= rate * (mean / (1 - BETAS[0] ** step)) / (np.sqrt(square / (1 - BETAS[1] ** step)) + 1e-8)


def _unscaled(weights: Weights, scales: Sequence[tuple[Floats, Floats]]) -> Net:
    """The same network on features as they are. One that never varied says nothing: nothing was learned of it."""
    (node_mean, node_scale), (token_mean, token_scale) = scales
    node, token = (
        np.where(scale[:, None] > STILL, weights[name] / scale[:, None], 0)
        for name, scale in (("node_weights", node_scale), ("token_weights", token_scale))
    )
    bias = weights["bias"] - node_mean @ node - token_mean @ token
    return new_net(*(np.ascontiguousarray(a, np.float32) for a in (node, token, bias, weights["prior"])))


def save(net: Net, path: Path) -> None:
    arrays = {name: getattr(net, name) for name in WEIGHTS}
    with path.open("wb") as file:  # given a name, numpy would add .npz to it
        np.savez_compressed(file, **arrays)
