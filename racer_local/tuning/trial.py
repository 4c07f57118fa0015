"""What a candidate does with a model: opened, read a prompt, then sample after sample of the same work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from racer_local.config import ContextConfig, DraftConfig
from racer_local.cost import VerifyCost
from racer_local.draft import Drafter, make_drafter
from racer_local.draft.none import NoDrafter
from racer_local.engine import generate
from racer_local.llama import LlamaTarget, Model
from racer_local.llama.sampler import GreedySampler
from racer_local.racing import verify_cost
from racer_local.stats import GenerationStats
from racer_local.tree import Tokens
from racer_local.tuning.budget import Budget
from racer_local.tuning.search import Candidate
from racer_local.tuning.work import Work

OPEN = 2
"""Contexts at the same time: those that are compared."""
SIZES = (2, 4, 8, 16)
"""Nodes whose T(n) is told."""


@dataclass
class Figures:
    """What was measured of a candidate, all samples together."""

    drafted: GenerationStats = field(default_factory=GenerationStats)
    plain: GenerationStats = field(default_factory=GenerationStats)
    samples: int = 0
    prompt_tokens_per_second: float = 0.0
    """The fastest reading of the prompt."""
    relative: dict[int, float] = field(default_factory=dict)
    """T(n) / T(1) for SIZES; empty where nothing can be drafted."""
    memory_bytes: int = 0
    """About what weights, context, rows of logits and drafter take."""


def config_of(candidate: Candidate, context: ContextConfig) -> ContextConfig:
    """The context with these settings."""
    return replace(context, threads=candidate.threads, flash_attn=candidate.flash_attn, kv_type=candidate.kv_type)


class Trials:
    """Opens a model's candidates as they are asked for, at most OPEN at a time. Close it, also after an interrupt.

    Raises ModelError where a candidate can't be opened.
    """

    def __init__(self, model: Model, context: ContextConfig, work: Work, longest: float) -> None:
        """`longest`: seconds that one sample may take at most."""
        self.figures: dict[Candidate, Figures] = {}
        self._model, self._context, self._work, self._longest = model, context, work, longest
        self._open: dict[Candidate, _Trial] = {}
        """The one that was used last at the end."""

    def measure(self, candidate: Candidate, least: float) -> float:
        """Tokens/s of one sample of drafted decoding. Below `least` it is cut short. See `search.Measure`."""
        trial = self._open.pop(candidate, None)
        if trial is None:
            while len(self._open) >= OPEN:
                self._open.pop(next(iter(self._open))).close()
            figures = self.figures.get(candidate) or Figures()
            trial = _Trial(self._model, config_of(candidate, self._context), self._work, figures, self._longest)
            self.figures[candidate] = figures
        self._open[candidate] = trial
        tokens = self._work.drafted_tokens + self._work.plain_tokens
        return trial.sample(min(self._longest, tokens / least if least else self._longest))

    def close(self) -> None:
        for trial in self._open.values():
            trial.close()
        self._open.clear()

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Trial:
    """An opened candidate."""

    def __init__(self, model: Model, config: ContextConfig, work: Work, figures: Figures, longest: float) -> None:
        self._model, self._work, self._figures = model, work, figures
        self._draft = DraftConfig()
        self._target = LlamaTarget(model, config, max_nodes=self._draft.nodes)
        try:
            self._cost = self._measure_cost()
            self._read_prompt(longest)
        except BaseException:
            self._target.close()
            raise
        learned = 0
        if self._cost:
            from racer_local.draft.racer import RacerDrafter

            learned = RacerDrafter.memory_bytes(self._draft)
        rows = 4 * model.n_vocab * self._target.max_nodes
        figures.memory_bytes = model.memory_bytes(self._target.n_ctx, config.kv_type) + rows + learned

    def _measure_cost(self) -> VerifyCost | None:
        """T(n), which is remembered; None where nothing can be drafted."""
        if self._target.max_nodes == 1:
            return None
        cost = verify_cost(self._target, again=True)
        self._figures.relative = {n: float(cost.relative[n]) for n in SIZES if n <= self._target.max_nodes}
        return cost

    def _read_prompt(self, longest: float) -> None:
        """Cold, behind the forwards that measured the cost. It may take as long as two samples."""
        stats, budget = GenerationStats(), Budget(2 * longest)
        prompt = self._work.turns[0].prompt
        with stats.timing("prefill_seconds"):
            self._target.prefill(prompt[:-1], cancelled=lambda: budget.left <= 0)
        if (read := len(self._target.held)) and stats.prefill_seconds:
            speed = read / stats.prefill_seconds
            self._figures.prompt_tokens_per_second = max(self._figures.prompt_tokens_per_second, speed)

    def sample(self, seconds: float) -> float:
        """All turns drafted, by a drafter that has seen nothing, then a part of the first one plainly; tokens/s.

        The prompt stays in the cache. Where the seconds are up the rest is left out; one token counts in any case, so
        that there is something to compare with.
        """
        budget = Budget(seconds)

        def late() -> bool:
            return budget.left <= 0

        drafted, drafter = GenerationStats(), self._new_drafter()
        for turn in self._work.turns:
            if not late():
                drafted.add(self._write(turn.prompt, turn.answer, drafter, late))
        first = self._work.turns[0]
        if self._cost is None:
            self._figures.plain.add(drafted)
        elif not late():
            answer = first.answer[: self._work.plain_tokens]
            self._figures.plain.add(self._write(first.prompt, answer, NoDrafter(), late))
        self._figures.drafted.add(drafted)
        self._figures.samples += 1
        return drafted.tokens_per_second or 1 / seconds

    def _write(
        self, prompt: list[int], answer: list[int], drafter: Drafter, cancelled: Callable[[], bool]
    ) -> GenerationStats:
        stats = GenerationStats()
        stream = generate(
            self._target,
            drafter,
            _Following(answer),
            prompt,
            max_tokens=len(answer),
            end_tokens=(),
            max_nodes=1 if isinstance(drafter, NoDrafter) else self._draft.nodes,
            stats=stats,
            cancelled=cancelled,
        )
        for _ in stream:
            pass
        return stats

    def _new_drafter(self) -> Drafter:
        if self._cost is None:
            return NoDrafter()
        cost = VerifyCost(self._cost.sizes, self._cost.seconds)
        return make_drafter(self._draft, self._target.n_vocab, self._model.end_tokens, cost)

    def close(self) -> None:
        self._target.close()


class _Following:
    """Draws as greedy decoding does, for the time that takes, and returns the next token of a given answer.

    A draw is made for each kept node and no other, so they follow one another.
    """

    def __init__(self, answer: list[int]) -> None:
        self._greedy, self._rest = GreedySampler(), iter(answer)
        self._last = answer[-1]

    def begin(self, prompt: Tokens) -> None:
        self._greedy.begin(prompt)

    def draw(self, logits: NDArray[np.float32]) -> int:
        self._greedy.draw(logits)
        return next(self._rest, self._last)
