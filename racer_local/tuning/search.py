"""Which settings are fastest: challengers one by one against the best so far, in turns, since a machine drifts.

Two speeds measured minutes apart differ by what else the machine did. So they are measured in pairs: A B, B A, A B, ...
What counts is the ratio within a pair, and what the ratios differ by is the noise. A challenger wins only by more than
that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median, stdev

from racer_local.config import ContextConfig
from racer_local.errors import ModelError
from racer_local.tuning.budget import Budget

ROUNDS, MOST_ROUNDS = 3, 8
"""Pairs before a challenger can win, and at most: beyond ROUNDS only one that is ahead is measured on."""
FINAL_ROUNDS = 5
"""ROUNDS of the last comparison, which decides."""
LEAST = 0.02
"""A gain below it is not worth a setting of its own."""
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36)
"""Standard errors that count as noise, from two pairs on (Student's t, 95%). With 2 of them throughout, 13 of 100
searches among equals ended with another winner than the default where a sample's noise is 5%; now 2 do."""
HOPELESS = 0.85
"""A challenger that reaches no more of the other's speed in each of two pairs is given up; one may be a hiccup."""
CUT = 0.25
"""A sample may stop early at this share of the other's speed."""
STEEP = 0.8
"""Where another number of threads comes down to this share, those beyond it are not tried."""


@dataclass(frozen=True)
class Candidate:
    """Settings by their names in ContextConfig, which says what auto and None are."""

    threads: int
    flash_attn: str = "auto"
    kv_type: str | None = None
    quant: str | None = None
    """Of a copy of the model; None is the model itself."""


Measure = Callable[[Candidate, float], float]
"""One sample, in tokens/s, above 0. Below the speed given with it the sample may be cut short.

Raises ModelError where the candidate can't be opened."""


@dataclass
class Comparison:
    """A challenger against another candidate.

    Worked example: with the pairs (10, 12), (20, 24.2), (10, 11.9) the ratios are 1.2, 1.21 and 1.19, the gain 1.2, and
    the noise 4.30 x 0.01 / sqrt(3) = 0.025, so it is faster.
    """

    incumbent: Candidate
    challenger: Candidate
    pairs: list[tuple[float, float]] = field(default_factory=list)
    """Tokens/s of both, measured one after the other."""
    failed: str | None = None
    """Why the challenger could not be measured."""
    least_pairs: int = ROUNDS
    """Before the challenger can win."""

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for theirs, ours in self.pairs]

    @property
    def gain(self) -> float:
        """The challenger's speed in the other's; 1 where nothing was measured."""
        return median(self.ratios) if self.pairs else 1.0

    @property
    def noise(self) -> float:
        """What the gain may be off by; infinite where a single pair can't tell."""
        ratios = self.ratios
        if len(ratios) < 2:
            return math.inf
        return STUDENT[len(ratios) - 2] * stdev(ratios) / math.sqrt(len(ratios))

    @property
    def faster(self) -> bool:
        """Whether the challenger wins."""
        return len(self.pairs) >= self.least_pairs and self.gain - 1 > max(self.noise, LEAST)

    @property
    def decided(self) -> bool:
        """Whether more pairs would change nothing that matters."""
        ratios = self.ratios
        if len(ratios) > 1 and max(ratios) <= HOPELESS:
            return True
        return len(ratios) >= self.least_pairs and (self.faster or self.gain <= 1)


@dataclass
class Space:
    """What is tried. An empty list: that setting is the user's, or there is no other."""

    default: Candidate
    threads: Sequence[int] = ()
    guess: int | None = None
    """Of `threads`, the one that is tried first."""
    flash_attn: Sequence[str] = ()
    kv_types: Sequence[str] = ()


def space_for(context: ContextConfig, usable: int, busy: float | None = None, *, offloads: bool = False) -> Space:
    """What the context leaves open, on a machine with so many usable CPUs.

    With 8 cores: 1, 2, 4, 6 and 7 threads, and one for each CPU where these are more; with up to 4 cores every number.
    `busy`: how many CPUs other programs use; as many threads as are left are tried first. Where layers are offloaded,
    flash attention is on by default, so off is tried.
    """
    cores, space = context.n_threads, Space(Candidate(context.n_threads, context.flash_attn, context.kv_type))
    if context.threads is None:
        few = set(range(1, cores)) if cores <= 4 else {cores - 1, 3 * cores // 4, cores // 2, cores // 4, 1}
        spare = max(1, round(usable - (busy or 0.0)))
        space.guess = spare if spare < cores else None
        space.threads = sorted({*few, *([spare] if spare < cores else []), *([usable] if usable > cores else [])})
    if context.flash_attn == "auto" and context.kv_type != "q8_0":
        space.flash_attn = ["off" if offloads else "on"]
    if context.kv_type is None:
        space.kv_types = ["bf16"] if context.flash_attn == "off" else ["bf16", "q8_0"]
    return space


@dataclass
class Found:
    """What the search knows, filled while it goes on, so that an interrupted one still has it."""

    default: Candidate
    best: Candidate
    comparisons: list[Comparison] = field(default_factory=list)
    final: Comparison | None = None
    """The best against the default once more."""
    late: list[Candidate] = field(default_factory=list)
    """Not tried for want of time."""
    pointless: list[Candidate] = field(default_factory=list)
    """Not tried since their neighbours had lost clearly."""
    relative: dict[Candidate, float] = field(default_factory=dict)
    """Speed in that of the default, by way of those that were compared with it."""

    @classmethod
    def start(cls, default: Candidate) -> Found:
        return cls(default, default, relative={default: 1.0})


OnPair = Callable[[Comparison], object]


def search(
    space: Space, measure: Measure, budget: Budget, found: Found, on_pair: OnPair = lambda comparison: None
) -> None:
    """Threads, then flash attention, then the type of keys and values; then the best against the default once more.

    Raises ModelError where the default can't be opened.
    """
    arena = _Arena(measure, budget, on_pair)
    _threads(space, arena, found)
    for flash_attn in space.flash_attn:
        _try(replace(found.best, flash_attn=flash_attn), arena, found)
    for kv_type in space.kv_types:
        _try(_with_kv_type(found.best, kv_type), arena, found)
    if found.best != found.default:
        found.final = Comparison(found.default, found.best, least_pairs=FINAL_ROUNDS)
        arena.run(found.final)
        if not found.final.faster:
            found.best = found.default


def compare(
    comparison: Comparison, measure: Measure, budget: Budget, on_pair: OnPair = lambda comparison: None
) -> None:
    """Pairs until it is decided, or time is up. Raises ModelError where the incumbent can't be opened."""
    _Arena(measure, budget, on_pair).run(comparison)


def _threads(space: Space, arena: _Arena, found: Found) -> None:
    """The guess first, then always the one nearest to the best, and none beyond one that lost clearly."""
    left, guess = list(space.threads), space.guess
    while left:
        best = found.best.threads
        threads = guess if guess in left else min(left, key=lambda number: (abs(number - best), number))
        guess = None
        left.remove(threads)
        result = _try(replace(found.best, threads=threads), arena, found)
        if result and result.gain <= STEEP:
            beyond = [number for number in left if number < threads < best or number > threads > best]
            left = [number for number in left if number not in beyond]
            found.pointless += [replace(found.best, threads=number) for number in beyond]


def _with_kv_type(best: Candidate, kv_type: str) -> Candidate:
    return replace(best, kv_type=kv_type, flash_attn="on" if kv_type == "q8_0" else best.flash_attn)


def _try(challenger: Candidate, arena: _Arena, found: Found) -> Comparison | None:
    """Against the best so far, whose place it takes if it is faster; None where there is no time for it."""
    reserve = arena.shortest + (FINAL_ROUNDS - ROUNDS) * arena.pair  # the last comparison needs time too
    if arena.budget.left <= arena.shortest + reserve:
        found.late.append(challenger)
        return None
    comparison = Comparison(found.best, challenger)
    found.comparisons.append(comparison)
    arena.run(comparison, reserve)
    if comparison.pairs:
        found.relative[challenger] = found.relative[found.best] * comparison.gain
    if comparison.faster:
        found.best = challenger
    return comparison


class _Arena:
    """Where two candidates meet, and what a pair takes there."""

    def __init__(self, measure: Measure, budget: Budget, on_pair: OnPair) -> None:
        self.budget = budget
        self._measure, self._on_pair = measure, on_pair
        self._first: list[float] = []
        """Seconds of each comparison's first pair, which opens a context."""
        self._later: list[float] = []

    @property
    def pair(self) -> float:
        """Seconds of one that opens nothing; 0 where none was measured."""
        return median(self._later or self._first or [0.0])

    @property
    def shortest(self) -> float:
        """Seconds of the shortest comparison that can be won."""
        return max(self._first[-2:], default=0.0) + (ROUNDS - 1) * self.pair

    def run(self, comparison: Comparison, reserve: float = 0.0) -> None:
        """Until it is decided, or no more than `reserve` would be left of the budget."""
        both = comparison.incumbent, comparison.challenger
        while len(comparison.pairs) < MOST_ROUNDS and not comparison.decided:
            if comparison.pairs and self.budget.left < self.pair + reserve:
                return
            with self._timing(self._later if comparison.pairs else self._first):
                least = CUT * max((theirs for theirs, _ in comparison.pairs), default=0.0)
                try:
                    if len(comparison.pairs) % 2:
                        ours = self._measure(both[1], least)
                        theirs = self._measure(both[0], 0.0)
                    else:
                        theirs = self._measure(both[0], 0.0)
                        ours = self._challenge(comparison, CUT * theirs)
                except _Unopened:
                    return
            comparison.pairs.append((theirs, ours))
            self._on_pair(comparison)

    def _challenge(self, comparison: Comparison, least: float) -> float:
        """The challenger's sample; what keeps it from being opened is noted."""
        try:
            return self._measure(comparison.challenger, least)
        except ModelError as error:
            comparison.failed = str(error)
            raise _Unopened from error

    @contextmanager
    def _timing(self, to: list[float]) -> Iterator[None]:
        started = self.budget.clock()
        yield
        to.append(self.budget.clock() - started)


class _Unopened(Exception):
    """The challenger could not be opened."""
