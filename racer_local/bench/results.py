"""What a suite measured, read back: sums by category and way, ratios with their spread, and what was to be had at most.

A file has a line of JSON for what it was measured on, and one for each question; it may have been cut off at any byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from racer_local.bench.data import MIN_CATEGORY, MIN_SPEEDUP
from racer_local.cost import VerifyCost
from racer_local.errors import ConfigError
from racer_local.stats import GenerationStats, add_counters

if TYPE_CHECKING:  # reading results needs no model
    from racer_local.session import Answer

FORMAT = 1
PLAIN, TOTAL = "none", "total"
RESAMPLES, SEED = 2000, 0
LOW, HIGH = 0.05, 0.95
"""Of a ratio's spread: between these quantiles lie nine of ten resamples of the questions."""
Key = tuple[float, int, str, str]
"""(temperature, repeat, category, question)."""


@dataclass
class Counts:
    """One answer of one way, or the sums of several. Times are seconds."""

    tokens: int = 0
    seconds: float = 0.0
    """With the prompt."""
    timed_tokens: int = 0
    timed_seconds: float = 0.0
    """Without it. A peer's first token comes with the prompt, so it has one timed token less."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    steps: int = 0
    """Forwards behind the prompt; 0 where a peer does not tell."""
    drafted: int = 0
    accepted: int = 0
    by_source: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    """Steps by the size of their tree, root counted."""
    lengths: dict[str, int] = field(default_factory=dict)
    """Steps by how many draft nodes became text."""
    differs: int | None = None
    """The first token that is not plain decoding's; None where all agree."""
    passed: bool | None = None
    """Whether the program that was asked for passes its tests."""
    error: str = ""

    @classmethod
    def of(cls, answer: Answer, plain: Answer, *, in_prefill: bool) -> Counts:
        """in_prefill: whether the first token came with the prompt, so that its time is not the decoding's."""
        stats, n = answer.stats, len(answer.token_ids)
        return cls(
            tokens=n,
            seconds=round(stats.prefill_seconds + stats.decode_seconds, 6),
            timed_tokens=max(0, n - 1) if in_prefill else n,
            timed_seconds=round(stats.decode_seconds, 6),
            draft_seconds=round(stats.draft_seconds, 6),
            verify_seconds=round(stats.verify_seconds, 6),
            steps=stats.steps,
            drafted=stats.drafted,
            accepted=stats.accepted,
            by_source={name: count for name, count in stats.accepted_by_source.items() if count},
            nodes={str(n): count for n, count in stats.steps_by_nodes.items()},
            lengths={str(n): count for n, count in stats.steps_by_accepted.items()},
            differs=_first_difference(answer.token_ids, plain.token_ids),
        )

    @classmethod
    def sum(cls, counts: Iterable[Counts]) -> Counts:
        """What is counted of all of them."""
        total = cls()
        for one in counts:
            add_counters(total, one)
        return total

    @property
    def stats(self) -> GenerationStats:
        """For its ratios."""
        return GenerationStats(emitted=self.tokens, steps=self.steps, drafted=self.drafted, accepted=self.accepted)


@dataclass
class Record:
    """One question of one pass: for each of its turns the counts of each way. No turns: it did not fit."""

    temperature: float
    repeat: int
    category: str
    question: str
    turns: list[dict[str, Counts]]

    @property
    def key(self) -> Key:
        return self.temperature, self.repeat, self.category, self.question

    def sums(self, way: str) -> Counts | None:
        """Over the turns; None where the way was not asked or failed."""
        counts = [turn[way] for turn in self.turns if way in turn]
        if not counts or any(one.error for one in counts):
            return None
        return Counts.sum(counts)

    def line(self) -> str:
        slim = [{way: _without_defaults(counts) for way, counts in turn.items()} for turn in self.turns]
        return json.dumps({**asdict(self), "turns": slim}, ensure_ascii=False) + "\n"

    @classmethod
    def parse(cls, line: str) -> Record:
        data = json.loads(line)
        turns = [{way: Counts(**counts) for way, counts in turn.items()} for turn in data["turns"]]
        return cls(data["temperature"], data["repeat"], data["category"], data["question"], turns)


class Spread(NamedTuple):
    """A ratio, and where nine of ten resamples of the questions put it."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.2f}x ({self.low:.2f} to {self.high:.2f})"


NOTHING = Spread(float("nan"), float("nan"), float("nan"))


@dataclass
class Results:
    """A suite's file."""

    header: dict[str, Any]
    records: list[Record]

    @property
    def ways(self) -> list[str]:
        return list(self.header["ways"])

    @property
    def temperatures(self) -> list[float]:
        return sorted({record.temperature for record in self.records})

    @property
    def cost(self) -> VerifyCost | None:
        """T(n) at the start."""
        curve = self.header["cost"]
        return VerifyCost([int(n) for n in curve], list(curve.values()), fixed=True) if curve else None

    def at(self, temperature: float) -> View:
        """What was measured at a temperature."""
        return View(self, [r for r in self.records if r.temperature == temperature and r.turns])


@dataclass
class View:
    """Records of one temperature, by category; TOTAL has all of them."""

    results: Results
    records: list[Record]

    @cached_property
    def categories(self) -> list[str]:
        return [*dict.fromkeys(record.category for record in self.records), TOTAL]

    def of(self, category: str) -> list[Record]:
        return [record for record in self.records if category in (record.category, TOTAL)]

    def sums(self, category: str, way: str) -> Counts:
        """All that a way took."""
        return Counts.sum(one for record in self.of(category) if (one := record.sums(way)))

    def answers(self, category: str, way: str) -> list[Counts]:
        """Those that did not fail, turn by turn."""
        found = [turn[way] for record in self.of(category) for turn in record.turns if way in turn]
        return [one for one in found if not one.error]

    def errors(self, way: str) -> list[str]:
        return [turn[way].error for record in self.records for turn in record.turns if way in turn and turn[way].error]

    def speed_up(self, category: str, way: str, *, prompt: bool = False) -> Spread:
        """Plain decoding's seconds over the way's for as many tokens, over the questions that both answered.

        prompt: with the time to read the prompt.
        """
        return ratio_of([_rates(record, way, prompt) for record in self.of(category)])

    def by_repeat(self, category: str, way: str) -> list[float]:
        """The speed-up in each repeat by itself."""
        repeats = sorted({record.repeat for record in self.records})
        parts = [[r for r in self.of(category) if r.repeat == repeat] for repeat in repeats]
        return [ratio_of([_rates(record, way, False) for record in part]).ratio for part in parts]

    def ceiling(self, category: str) -> float:
        """The speed-up of an oracle that drafts the true continuation, at the best sizes that T(n) allows."""
        cost = self.results.cost
        lengths = [one.tokens for one in self.answers(category, PLAIN)]
        if cost is None or not sum(lengths):
            return float("nan")
        least = oracle_times(cost.relative[: max(map(int, self.results.header["cost"])) + 1], max(lengths))
        return sum(lengths) / float(sum(least[n] for n in lengths))

    def passed(self, way: str) -> tuple[int, int]:
        """Programs that passed their tests, and all that were tested."""
        tested = [one.passed for one in self.answers(TOTAL, way) if one.passed is not None]
        return sum(tested), len(tested)

    def different(self, category: str, way: str) -> tuple[int, int]:
        """Answers with other tokens than plain decoding's, and all."""
        answers = self.answers(category, way)
        return sum(one.differs is not None for one in answers), len(answers)

    def parting(self, way: str) -> list[int]:
        """The token at which each different answer parts from plain decoding's, in order."""
        return sorted(one.differs for one in self.answers(TOTAL, way) if one.differs is not None)

    def figures(self, category: str, way: str) -> dict[str, Any]:
        """All of it, for JSON."""
        sums, spread = self.sums(category, way), self.speed_up(category, way)
        return {
            "speedup": _short(spread.ratio),
            "speedup_from_to": [_short(spread.low), _short(spread.high)],
            "speedup_with_prompt": _short(self.speed_up(category, way, prompt=True).ratio),
            "tokens": sums.tokens,
            "mat": _short(mat(sums)),
            "mean_nodes": _short(mean_nodes(sums)),
            "answers": self.different(category, way)[1],
            "different_answers": self.different(category, way)[0],
        }


class Change(NamedTuple):
    """What became of a way's speed-up between two files."""

    temperature: float
    category: str
    way: str
    before: float
    after: float
    change: Spread
    questions: int

    @property
    def real(self) -> bool:
        """More than the noise: all but one of twenty resamples lie on one side."""
        return not self.change.low <= 1 <= self.change.high


def read(path: Path) -> Results:
    """Raises ConfigError for what is no suite's file."""
    return parse(path)[0]


def parse(path: Path) -> tuple[Results, int]:
    """The results, and how many bytes of the file are whole lines."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    whole = raw[: raw.rfind(b"\n") + 1]
    try:
        first, *others = whole.decode("utf-8").removesuffix("\n").split("\n")
        header = json.loads(first)
        if header["racer_local_suite"] != FORMAT:
            raise ValueError(f"format {header['racer_local_suite']}, not {FORMAT}")
        return Results(header, [Record.parse(line) for line in others]), len(whole)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no file of: racer-local bench suite ({error!r})") from error


def ratio_of(rates: Iterable[tuple[float, float, float, float] | None]) -> Spread:
    """(seconds and tokens of one, seconds and tokens of the other) of each question: the ratio of the totals' rates.

    Worked example: 2 s for 10 tokens against 1 s for 10, and 4 s for 20 against 3 s for 20, is (6/30) / (4/30) = 1.5.
    """
    known = np.array([rate for rate in rates if rate], float).reshape(-1, 4)
    if not len(known) or not known.sum(0).all():
        return NOTHING
    low, high = np.quantile(_ratio(_resampled(known)), (LOW, HIGH))
    return Spread(float(_ratio(known.sum(0))), float(low), float(high))


def oracle_times(relative: Sequence[float] | NDArray[np.float64], longest: int) -> NDArray[np.float64]:
    """[longest + 1] the least time, in plain forwards, for n tokens when every draft is right.

    A step with n nodes costs relative[n] and emits n tokens. Worked example: with T(1..4) = 1, 1.5, 1.8, 3 four
    tokens take min(3, 1.8 + 1, 1.5 + 1.5) = 2.8.
    """
    least = np.zeros(longest + 1)
    costs = np.asarray(relative, float)
    for n in range(1, longest + 1):
        sizes = np.arange(1, min(n, len(costs) - 1) + 1)
        least[n] = np.min(costs[sizes] + least[n - sizes])
    return least


def compare(before: Results, after: Results) -> list[Change]:
    """Each way's speed-up in both files, over the questions that are in both.

    Speed-ups are ratios to plain decoding in the same run, so the files may be of different days.
    """
    changes = []
    for temperature in before.temperatures:
        old, new = before.at(temperature), after.at(temperature)
        both = {record.key: record for record in new.records}
        for category in old.categories:
            pairs = [(record, both[record.key]) for record in old.of(category) if record.key in both]
            for way in [way for way in before.ways if way in after.ways and way != PLAIN and pairs]:
                changes.append(_change(temperature, category, way, pairs))
    return [change for change in changes if change.questions]


def _change(temperature: float, category: str, way: str, pairs: Sequence[tuple[Record, Record]]) -> Change:
    rates = [(_rates(old, way, False), _rates(new, way, False)) for old, new in pairs]
    known = np.array([[*old, *new] for old, new in rates if old and new], float).reshape(-1, 8)
    if not len(known):
        return Change(temperature, category, way, 0.0, 0.0, NOTHING, 0)
    sums = _resampled(known)
    low, high = np.quantile(_ratio(sums[:, 4:]) / _ratio(sums[:, :4]), (LOW, HIGH))
    first, second = (float(_ratio(part)) for part in (known.sum(0)[:4], known.sum(0)[4:]))
    return Change(
        temperature, category, way, first, second, Spread(second / first, float(low), float(high)), len(known)
    )


def gate(results: Results, way: str, min_speedup: float = MIN_SPEEDUP, min_category: float = MIN_CATEGORY) -> list[str]:
    """What falls short of these speed-ups, in total and in each category, a line each."""
    if way not in results.ways:
        raise ConfigError(f"{way} was not measured; what was is {', '.join(results.ways)}")
    lines = [] if results.records else ["nothing was measured"]
    for temperature in results.temperatures:
        view = results.at(temperature)
        for category in view.categories:
            least = min_speedup if category == TOTAL else min_category
            found = view.speed_up(category, way)
            if not found.ratio >= least:
                lines.append(f"{category} at temperature {temperature:g}: {way} {found}, below {least:g}x")
    return lines


def mat(counts: Counts) -> float:
    """MAT; not a number where a peer does not tell its steps."""
    return counts.stats.mean_accepted_tokens if counts.steps else float("nan")


def mean_nodes(counts: Counts) -> float:
    """Nodes of a step's tree; not a number where a peer does not tell."""
    return counts.stats.mean_nodes if counts.steps else float("nan")


def gained(speed_up: float, ceiling: float) -> float:
    """The share of what was to be had beyond plain decoding."""
    return (speed_up - 1) / (ceiling - 1) if ceiling > 1 else float("nan")


def _rates(record: Record, way: str, prompt: bool) -> tuple[float, float, float, float] | None:
    plain, ours = record.sums(PLAIN), record.sums(way)
    if not plain or not ours:
        return None
    if prompt:
        return plain.seconds, plain.tokens, ours.seconds, ours.tokens
    return plain.timed_seconds, plain.timed_tokens, ours.timed_seconds, ours.timed_tokens


def _resampled(known: NDArray[np.float64]) -> NDArray[np.float64]:
    """[RESAMPLES, columns] sums over as many questions, drawn anew each time; without those that can't be divided."""
    chosen = np.random.default_rng(SEED).integers(len(known), size=(RESAMPLES, len(known)))
    sums = known[chosen].sum(1)
    return np.asarray(sums[sums.all(1)])


def _ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    seconds, tokens, our_seconds, our_tokens = np.moveaxis(sums, -1, 0)
    return np.asarray((seconds / tokens) / (our_seconds / our_tokens))


def _first_difference(ours: Sequence[int], plain: Sequence[int]) -> int | None:
    if list(ours) == list(plain):
        return None
    return next((i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), min(len(ours), len(plain)))


def _short(value: float) -> float | None:
    return None if value != value else round(value, 4)


def _without_defaults(counts: Counts) -> Mapping[str, Any]:
    return {
        name: value
        for name, value in asdict(counts).items()
        if value or value is False or (name == "differs" and value is not None)
    }
