"""T(n): what verifying a tree of n nodes costs. Measured, interpolated, remembered, and corrected by every step.

The curve is the model's, the quant's, the build's and the machine's, with steps of its own (4-row kernels, 16-row
tiles), so it is never assumed. What decides about a draft is T(n) / T(1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from racer_local import remembered
from racer_local.config import COST_CURVES, MAX_NODES
from racer_local.errors import ConfigError
from racer_local.kernels import drift

SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 48, 64, 96, 128, 192, MAX_NODES)
"""Where T(n) is measured: kernels work in blocks of 4, 8 or 16 rows, so just behind a block counts too."""
SMALL_MODEL_BUDGET, BUDGET = 1.0, 2.0
"""Seconds that a probe may take, at most (a model of which two forwards take longer is measured no further); the first
for a model whose forward is short."""
SMALL_MODEL = 0.02
"""Seconds of such a model's forward."""
ROUNDS = 5
"""Most times that a size is measured; the fastest counts, since noise only slows."""
KNOTS = (1, 2, 4, 8, 16, 32, 64, MAX_NODES)
"""Sizes whose drift from what was measured is followed; the others' lies between."""
DRIFT, PACE = 0.5, 0.04
"""How much slower or faster (log of seconds) than measured the whole machine may be, and become with each step."""
BEND, MEMORY = 0.2, 0.01
"""How far (log) a size may be off by itself, and the share of that which each step forgets."""
PLAIN_STEPS = 4
"""Of a row of plain steps the first and then every so many-th is looked at: looking has its price."""
NOISE, SURPRISE = 0.2, 0.3
"""Spread (log) of a step's time, and the most that one step counts: a hiccup is no trend."""
DEAREST = 1e9
KIND, FORMAT = "costs", 1


class VerifyCost:
    """A curve through measured points, linear between them and beyond the last two.

    Worked example: with the points 1:1 2:1.5 4:2, T(3) is 1.75 and T(6) is 2.5.

    >>> VerifyCost([1, 2, 4], [1.0, 1.5, 2.0]).relative[[1, 3, 6]].tolist()
    [1.0, 1.75, 2.5]
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float], *, fixed: bool = False) -> None:
        """`sizes` rise from 1. `fixed`: steps do not correct the curve."""
        if len(sizes) != len(seconds) or not sizes or sizes[0] != 1 or any(np.diff(sizes) < 1):
            raise ConfigError(f"a cost curve needs points n:T(n) with rising n from 1 on, not {list(sizes)}")
        if not all(0 < t <= DEAREST for t in seconds):
            raise ConfigError(f"each T(n) of a cost curve must be a positive number, not {list(seconds)}")
        self.sizes, self.seconds, self.fixed = list(sizes), list(map(float, seconds)), fixed
        points = np.maximum.accumulate(self.seconds)  # a larger tree can't cost less: that is noise
        measured = np.log(_interpolate(self.sizes, points))
        # What the machine does now, against what was measured: one number for all sizes, and one for each of KNOTS
        # but the first, which is what the others are compared with.
        n, knots = np.arange(MAX_NODES + 1), np.array(KNOTS)
        share = np.ascontiguousarray(np.array([np.interp(n, knots, row) for row in np.eye(len(KNOTS))]).T)
        share[:, 0] = 1
        bends = np.zeros((len(KNOTS), len(KNOTS)))
        bends[1:, 1:] = BEND**2 * np.exp(-np.abs(np.log2(knots[1:, None] / knots[None, 1:])))
        spread = bends.copy()
        spread[0, 0] = DRIFT**2
        state, reach = np.zeros((2, len(KNOTS)))
        self._drift = drift.Drift(measured, share, bends, state, spread, reach, np.ones(MAX_NODES + 1))
        drift.refresh(self._drift)
        self._steps, self._last = 0, 1

    @property
    def relative(self) -> NDArray[np.float64]:
        """[MAX_NODES + 1] T(n) / T(1), as it is now; relative[0] says nothing."""
        return self._drift.relative

    @property
    def plain_seconds(self) -> float:
        """T(1) as it is now: a plain forward."""
        return float(np.exp(self._drift.measured[1] + self._drift.state[0]))

    def correct(self, n: int, seconds: float) -> None:
        """A step with a tree of n nodes took so long.

        A Kalman filter. What slows the whole machine is likely and may change fast, but changes no decision; that
        one size, and those near it, got dearer by themselves is less likely, and is forgotten in some hundred steps, so
        that a size which was dear for a while is tried again.
        """
        if self.fixed or not (1 <= n <= MAX_NODES and 0 < seconds < math.inf):
            return
        self._steps += 1
        if n > 1 or self._last > 1 or self._steps >= PLAIN_STEPS:
            pace, memory = PACE * self._steps**0.5, 1 - (1 - MEMORY) ** self._steps
            drift.correct(self._drift, n, math.log(seconds), pace, memory, NOISE, SURPRISE)
            self._steps, self._last = 0, n

    @classmethod
    def parse(cls, points: str) -> VerifyCost:
        """A fixed curve from "1:1 2:1.45 4:1.53", or by its name in COST_CURVES."""
        try:
            pairs = [point.split(":") for point in COST_CURVES.get(points, points).replace(",", " ").split()]
            sizes, seconds = [int(n) for n, _ in pairs], [float(t) for _, t in pairs]
            return cls(sizes, seconds, fixed=True)
        except ConfigError:
            raise
        except (ValueError, OverflowError) as error:
            raise ConfigError(
                f"the cost curve {points!r} must be one of {', '.join(COST_CURVES)}, or points like '1:1 2:1.5 8:3'"
            ) from error


def _interpolate(sizes: Sequence[int], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """[MAX_NODES + 1] seconds for each number of nodes."""
    n = np.arange(MAX_NODES + 1)
    curve = np.interp(n, sizes, seconds)
    if len(sizes) > 1:
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        curve = np.where(n > sizes[-1], seconds[-1] + (n - sizes[-1]) * slope, curve)
    return np.asarray(curve)


def probe(evaluate: Callable[[int], object], most: int, clock: Callable[[], float] = perf_counter) -> VerifyCost:
    """Measure T(n) up to `most` nodes; evaluate(n) is one forward of n tokens.

    Sizes rise until the budget is used up, so a slow model's dear sizes are extrapolated; what time is left goes to
    measuring again.
    """

    def measure(n: int) -> float:
        started = clock()
        evaluate(n)
        return clock() - started

    start = clock()
    evaluate(1)  # the first forward of a process pays for much else
    first = measure(1)
    budget = SMALL_MODEL_BUDGET if first < SMALL_MODEL else BUDGET
    fastest: dict[int, float] = {1: first}
    for round_number in range(ROUNDS):
        for n in [size for size in SIZES if size <= most]:
            dearer = [t for size, t in fastest.items() if size <= n]
            expected = fastest.get(n, 2 * max(dearer))
            if clock() - start + expected > budget:
                break
            if n in fastest or round_number == 0:
                fastest[n] = min(fastest.get(n, math.inf), measure(n))
    sizes = sorted(fastest)
    if len(sizes) == 1:  # no time for a second size: the dearest that is likely
        sizes, fastest = [1, 2], {1: fastest[1], 2: 2 * fastest[1]}
    return VerifyCost(sizes, [fastest[n] for n in sizes])


def recall(facts: Mapping[str, Any], folder: Path | None = None) -> VerifyCost | None:
    """The curve remembered for these facts (model, build, threads, ...), or None."""
    data = remembered.recall(KIND, FORMAT, facts, folder)
    try:
        if data is None or not all(type(n) is int for n in data["sizes"]):
            return None
        return VerifyCost(data["sizes"], data["seconds"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def remember(facts: Mapping[str, Any], cost: VerifyCost, folder: Path | None = None) -> None:
    """Keep a measured curve for these facts."""
    remembered.remember(KIND, FORMAT, facts, {"sizes": cost.sizes, "seconds": cost.seconds}, folder)
