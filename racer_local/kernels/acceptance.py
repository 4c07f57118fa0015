"""From evidence to probabilities: a small network whose last layer goes on learning."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from racer_local.kernels.evidence import CANDIDATES, NODE_FEATURES, TOKEN_FEATURES

Floats = NDArray[np.float32]


class Net(NamedTuple):
    """score = out . max(0, node @ node_weights + token @ token_weights + bias) + out_bias, for each candidate.

    The probabilities of the candidates and of "none of them" (score 0) are a softmax.
    """

    node_weights: Floats
    """[node features, h]"""
    token_weights: Floats
    """[token features, h]"""
    bias: Floats
    """[h]"""
    prior: Floats
    """[h + 1] `out` as it was fitted; the last one is out_bias."""
    out: Floats
    """[h + 1] as it is now."""
    base: Floats
    """[h] scratch."""
    hidden: Floats
    """[C, h] scratch."""
    p: Floats
    """[C] the probabilities."""


def new_net(node_weights: Floats, token_weights: Floats, bias: Floats, prior: Floats) -> Net:
    h = len(bias)
    wanted = [(len(NODE_FEATURES), h), (len(TOKEN_FEATURES), h), (h,), (h + 1,)]
    weights = [node_weights, token_weights, bias, prior]
    if [w.shape for w in weights] != wanted:
        raise ValueError("the fitted weights are of other features than these kernels compute; fit them again")
    if not all(w.dtype == np.float32 and np.isfinite(w).all() for w in weights):
        raise ValueError("the fitted weights must be finite float32 numbers; fit them again")
    scratch = np.zeros(h, np.float32), np.zeros((CANDIDATES, h), np.float32), np.zeros(CANDIDATES, np.float32)
    return Net(node_weights, token_weights, bias, prior, prior.copy(), *scratch)


@njit(cache=True, fastmath={"reassoc", "contract", "nsz"})
def estimate(net, evidence, size):  # type: ignore[no-untyped-def]
    """Fill net.p with the probability that each of the `size` candidates comes next."""
    node, features, node_weights, token_weights = evidence.node, evidence.features, net.node_weights, net.token_weights
    base, hidden, out, p = net.base, net.hidden, net.out, net.p
    h = base.shape[0]
    for i in range(h):
        base[i] = net.bias[i]
    for f in range(node.shape[0]):
        if node[f] != 0:
            for i in range(h):
                base[i] += node[f] * node_weights[f, i]
    highest = np.float32(0)
    for c in range(size):
        for i in range(h):
            hidden[c, i] = base[i]
        for f in range(features.shape[1]):
            feature = features[c, f]
            if feature != 0:
                for i in range(h):
                    hidden[c, i] += feature * token_weights[f, i]
        score = out[h]
        for i in range(h):
            hidden[c, i] = max(hidden[c, i], np.float32(0))
            score += hidden[c, i] * out[i]
        p[c] = score
        highest = max(highest, score)
    total = np.exp(-highest)
    for c in range(size):
        p[c] = np.exp(p[c] - highest)
        total += p[c]
    for c in range(size):
        p[c] /= total


@njit(cache=True)
def learn(net, evidence, size, token, rate, pull):  # type: ignore[no-untyped-def]
    """One gradient step of the last layer: `token` came after the context that was estimated last.

    `pull` is the share by which it goes back to the fitted prior: what one bad stretch teaches fades.
    """
    h = net.bias.shape[0]
    for i in range(h + 1):
        net.out[i] += pull * (net.prior[i] - net.out[i])
    for c in range(size):
        step = rate * (net.p[c] - (np.float32(1) if evidence.tokens[c] == token else np.float32(0)))
        for i in range(h):
            net.out[i] -= step * net.hidden[c, i]
        net.out[h] -= step


def warm_up() -> None:
    from racer_local.kernels.evidence import new_evidence

    shapes = (len(NODE_FEATURES), 2), (len(TOKEN_FEATURES), 2), (2,), (3,)
    net, evidence = new_net(*(np.zeros(shape, np.float32) for shape in shapes)), new_evidence(2)
    estimate(net, evidence, 1)
    learn(net, evidence, 1, np.int32(0), np.float32(0.1), np.float32(0.1))
