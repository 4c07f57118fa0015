"""T(n): what verifying a tree of n nodes costs. Measured, interpolated, remembered, and corrected by every step.

The curve is the model's, the quant's, the build's and the machine's, with steps of its own (4-row kernels, 16-row
tiles), so it is never assumed. What decides about a draft is T(n) / T(1).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from racer_local.config import COST_CURVES, MAX_NODES, cache_home
from racer_local.errors import ConfigError

SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 48, 64, 96, 128, 192, MAX_NODES)
"""Where T(n) is measured: kernels work in blocks of 4, 8 or 16 rows, so just behind a block counts too."""
SMALL_MODEL_BUDGET, BUDGET = 1.0, 2.0
"""Seconds that a probe may take, at most; the first for a model whose forward is short."""
SMALL_MODEL = 0.02
"""Seconds of such a model's forward."""
ROUNDS = 5
"""Most times that a size is measured; the fastest counts, since noise only slows."""
GAIN = 0.1
"""Share of a step's surprise that corrects the curve."""
SURPRISE = 0.5
"""A step counts as at most this far off (log of seconds): one hiccup is no trend."""
FORGETTING = 0.005
"""With each plain step the corrections of larger trees fade by this share, so that they are tried again."""
FORMAT = 1


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
        if not all(math.isfinite(t) and t > 0 for t in seconds):
            raise ConfigError(f"each T(n) of a cost curve must be a positive number, not {list(seconds)}")
        self.sizes, self.seconds, self.fixed = list(map(int, sizes)), list(map(float, seconds)), fixed
        points = np.maximum.accumulate(self.seconds)  # a larger tree can't cost less: that is noise
        self._measured = np.log(_interpolate(self.sizes, points))
        self._knots = np.array(SIZES)
        self._corrections = np.zeros(len(SIZES))
        self._slower = 0.0
        self._refresh()

    def _refresh(self) -> None:
        n = np.arange(MAX_NODES + 1)
        curve = np.exp(self._measured + np.interp(n, self._knots, self._corrections))
        self.relative: NDArray[np.float64] = np.maximum.accumulate(curve / curve[1])
        """[MAX_NODES + 1] T(n) / T(1), as it is now; relative[0] says nothing."""

    def correct(self, n: int, seconds: float) -> None:
        """A step with a tree of n nodes took so long.

        What slows all sizes alike changes no decision; what slows large trees more than small ones does. A plain
        step tells of the first alone; a larger one of both, and of sizes near its own.
        """
        if self.fixed or seconds <= 0:
            return
        expected = self._measured[n] + self._slower + np.interp(n, self._knots, self._corrections)
        surprise = GAIN * min(SURPRISE, max(-SURPRISE, math.log(seconds) - expected))
        if n == 1:
            self._slower += surprise
            self._corrections *= 1 - FORGETTING
        else:
            self._slower += surprise / 2
            nearness = np.exp(-np.abs(np.log2(self._knots / n)))
            nearness[0] = 0  # T(1) is the measure
            self._corrections += surprise / 2 * nearness
        self._refresh()

    @classmethod
    def parse(cls, points: str) -> VerifyCost:
        """A fixed curve from "1:1 2:1.45 4:1.53", or by its name in COST_CURVES."""
        try:
            pairs = [point.split(":") for point in COST_CURVES.get(points, points).replace(",", " ").split()]
            sizes, seconds = [int(n) for n, _ in pairs], [float(t) for _, t in pairs]
        except ValueError as error:
            raise ConfigError(
                f"the cost curve {points!r} must be one of {', '.join(COST_CURVES)}, or points like '1:1 2:1.5 8:3'"
            ) from error
        return cls(sizes, seconds, fixed=True)


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
    """The curve remembered for these facts (model, build, threads, ...), or None.

    A file that is damaged, of another format or about other facts is as good as none.
    """
    try:
        data = json.loads(_path(facts, folder).read_text(encoding="utf-8"))
        if data["format"] != FORMAT or data["facts"] != json.loads(json.dumps(facts)):
            return None
        return VerifyCost(data["sizes"], data["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(facts: Mapping[str, Any], cost: VerifyCost, folder: Path | None = None) -> None:
    """Keep a measured curve for these facts; where the folder can't be written it is measured again next time."""
    path = _path(facts, folder)
    data = {"format": FORMAT, "facts": dict(facts), "sizes": cost.sizes, "seconds": cost.seconds}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as file:
            json.dump(data, file)
        os.replace(file.name, path)
    except OSError:
        return


def _path(facts: Mapping[str, Any], folder: Path | None) -> Path:
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return (folder or cache_home() / "costs") / f"{key}.json"
