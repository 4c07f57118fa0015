"""A Kalman filter for a cost curve that drifts away from what was measured; see `racer_local.cost`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Drift(NamedTuple):
    """All logarithms. State 0 is the machine's, which all sizes share; the others are of one size each."""

    measured: Floats
    """[N + 1] seconds of each number of nodes."""
    share: Floats
    """[N + 1, K] how much of each state is in the seconds of n nodes."""
    bends: Floats
    """[K, K] covariance of the states of sizes at rest; 0 for the machine's."""
    state: Floats
    """[K]"""
    spread: Floats
    """[K, K] its covariance."""
    reach: Floats
    """[K] scratch."""
    relative: Floats
    """[N + 1] T(n) / T(1), not falling."""


@njit(cache=True)
def refresh(drift):  # type: ignore[no-untyped-def]
    """Fill in `relative`."""
    highest = 1.0
    for n in range(1, drift.measured.shape[0]):
        log = drift.measured[n] - drift.measured[1]
        for k in range(1, drift.state.shape[0]):
            if drift.share[n, k] != 0:
                log += drift.share[n, k] * drift.state[k]
        highest = max(highest, np.exp(log))
        drift.relative[n] = highest
    drift.relative[0] = 1.0


@njit(cache=True)
def correct(drift, n, seconds, pace, memory, noise, surprise):  # type: ignore[no-untyped-def]
    """A tree of n nodes took so long (natural logarithm of seconds).

    pace: how much the machine changes with a step; memory: the share that the other states forget with it; noise:
    spread of a step; surprise: the most that one step counts.
    """
    state, spread, reach, size = drift.state, drift.spread, drift.reach, drift.state.shape[0]
    for i in range(1, size):
        state[i] *= 1 - memory
        spread[0, i] *= 1 - memory
        spread[i, 0] *= 1 - memory
        for j in range(1, size):
            spread[i, j] = spread[i, j] * (1 - memory) ** 2 + memory * (2 - memory) * drift.bends[i, j]
    spread[0, 0] += pace**2
    expected, uncertain = drift.measured[n], noise**2
    for i in range(size):
        reach[i] = 0.0
        for j in range(size):
            reach[i] += spread[i, j] * drift.share[n, j]
        expected += drift.share[n, i] * state[i]
        uncertain += drift.share[n, i] * reach[i]
    error = min(surprise, max(-surprise, seconds - expected))
    for i in range(size):
        state[i] += reach[i] * error / uncertain
        for j in range(size):
            spread[i, j] -= reach[i] * reach[j] / uncertain
    refresh(drift)


def warm_up() -> None:
    one, two = np.zeros(3), np.zeros((3, 3))
    drift = Drift(np.zeros(3), np.zeros((3, 3)), two.copy(), one.copy(), two.copy(), one.copy(), np.zeros(3))
    correct(drift, 1, 0.0, 0.1, 0.1, 0.1, 0.1)
