"""Raw counters of a generation, and the one definition of every ratio."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from time import perf_counter
from typing import Any

from racer_local.tree import DraftTree, NodeIds, Source


@dataclass
class GenerationStats:
    """What one answer cost. Times are seconds of wall clock, without the time the caller took between tokens."""

    draft: str = ""
    exact: bool = False
    """Whether the ids are plain decoding's, to the bit."""
    row_limit: int | None = None
    """The largest tree that keeps them so, root counted; None where nothing limits it."""
    disabled_reason: str | None = None
    """Why nothing was drafted though it was asked for."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the target still held."""
    emitted: int = 0
    steps: int = 0
    """Forwards after prefill."""
    drafted: int = 0
    """Draft nodes verified, roots not counted."""
    accepted: int = 0
    """Draft nodes whose token became text."""
    accepted_by_source: dict[str, int] = field(default_factory=lambda: {"context": 0, "logits": 0, "corpus": 0})
    steps_by_nodes: dict[int, int] = field(default_factory=dict)
    """How many trees had so many nodes, root counted."""
    steps_by_accepted: dict[int, int] = field(default_factory=dict)
    """Of how many trees so many draft nodes became text."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    """The whole loop: draft, verify, draw, learn, commit."""
    draft_seconds: float = 0.0
    """The drafter's part of it: draft, top-k, observe, accept."""
    verify_seconds: float = 0.0
    """The target's part of it: evaluate, commit."""
    finish_reason: str | None = None
    """stop: an end token; length: max_tokens or a full context; cancelled: the caller's `cancelled`."""

    @contextmanager
    def timing(self, *counters: str) -> Iterator[None]:
        """Adds the seconds that its body takes to these counters."""
        started = perf_counter()
        try:
            yield
        finally:
            seconds = perf_counter() - started
            for counter in counters:
                setattr(self, counter, getattr(self, counter) + seconds)

    def count_step(self, tree: DraftTree, kept: NodeIds) -> None:
        """One verified tree of which the nodes `kept` (root first) became text."""
        self.steps += 1
        self.drafted += len(tree) - 1
        accepted = max(0, len(kept) - 1)
        self.accepted += accepted
        self.steps_by_nodes[len(tree)] = self.steps_by_nodes.get(len(tree), 0) + 1
        self.steps_by_accepted[accepted] = self.steps_by_accepted.get(accepted, 0) + 1
        for source in tree.sources[kept[1:]].tolist():
            self.accepted_by_source[Source(source).name.lower()] += 1

    @property
    def mean_accepted_tokens(self) -> float:
        """MAT: tokens emitted per forward after prefill, the bonus token included."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def mean_nodes(self) -> float:
        """Nodes of a step's tree, root counted."""
        return 1 + self.drafted / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft nodes per drafted node."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.emitted / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def time_shares(self) -> dict[str, float]:
        """Shares of decode_seconds; sample is drawing tokens and what else the loop does."""
        total = self.decode_seconds or 1.0
        draft, verify = self.draft_seconds / total, self.verify_seconds / total
        return {"draft": draft, "verify": verify, "sample": 1.0 - draft - verify}

    def add(self, other: GenerationStats) -> None:
        """Take another answer's raw counts in."""
        add_counters(self, other)

    def as_dict(self) -> dict[str, Any]:
        """The `stats` object of the command line's JSON."""
        return {
            "draft": self.draft,
            "exact": self.exact,
            "row_limit": self.row_limit,
            "disabled_reason": self.disabled_reason,
            "steps": self.steps,
            "mean_accepted_tokens": round(self.mean_accepted_tokens, 4),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_by_source": dict(self.accepted_by_source),
            "prefill_seconds": round(self.prefill_seconds, 6),
            "decode_seconds": round(self.decode_seconds, 6),
            "draft_seconds": round(self.draft_seconds, 6),
            "tokens_per_second": round(self.tokens_per_second, 3),
        }


def add_counters(ours: Any, theirs: Any) -> None:
    """Add another's raw counts, plain ones and those by name, to an object's of the same dataclass."""
    for counter in fields(ours):
        mine, more = getattr(ours, counter.name), getattr(theirs, counter.name)
        if counter.type in ("int", "float"):
            setattr(ours, counter.name, mine + more)
        elif isinstance(mine, dict):
            for name, count in more.items():
                mine[name] = mine.get(name, 0) + count


def speed_up(baseline: GenerationStats, ours: GenerationStats) -> float:
    """Baseline seconds over our seconds for the same number of tokens."""
    return ours.tokens_per_second / baseline.tokens_per_second if baseline.tokens_per_second else 0.0
