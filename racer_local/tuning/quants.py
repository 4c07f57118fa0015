"""Requantized copies of a model: how fast each is, and how often its next token is another than the model's own.

They only inform. None takes the model's place.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from racer_local import cost, remembered
from racer_local.config import PROMPT_ROWS, ContextConfig, ModelConfig
from racer_local.errors import ConfigError, ModelError
from racer_local.llama import LlamaTarget, Model
from racer_local.llama.quantize import WHOLE, quantize, size_of, type_of
from racer_local.tree import Tokens
from racer_local.tuning.budget import Budget
from racer_local.tuning.search import Candidate, Comparison, OnPair, compare
from racer_local.tuning.trial import Figures, Trials, config_of
from racer_local.tuning.work import Work

MOST_TOKENS = 2048
"""Of the text that next tokens are compared on."""


@dataclass(frozen=True)
class Agreement:
    """How near the next tokens of a copy are to the model's, over the positions of a text."""

    positions: int
    same: int
    """Positions at which both have the same likeliest token."""
    divergence: float
    """Mean of KL(model || copy), in nats."""

    @property
    def share(self) -> float:
        return self.same / self.positions if self.positions else 1.0


@dataclass
class Copy:
    """What is known of one. What is None was not measured."""

    quant: str
    bytes: int | None = None
    path: Path | None = None
    """Where it lies, if it is kept."""
    comparison: Comparison | None = None
    """With the model itself, in the same settings."""
    figures: Figures = field(default_factory=Figures)
    agreement: Agreement | None = None
    failed: str | None = None
    """Why it could not be made or opened."""


def name_of(path: Path, quant: str) -> str:
    return f"{path.stem}-to-{quant}.gguf"


def to_make(model: Model, quants: Sequence[str], notify: Callable[[str], object]) -> list[str]:
    """Those that are not what the model is already, and what should be known of the others."""
    own = type_of(model)
    if own in quants:
        notify(f"{model.path.name} is {own} already")
    left = [quant for quant in quants if quant != own]
    if left and own not in WHOLE:
        notify(
            f"{model.path.name} is {own}; a copy of what is quantized already loses more than one that is made "
            f"of the F16 file"
        )
    return left


@contextmanager
def folder_for(model: Model, quants: Sequence[str], kept: Path | None) -> Iterator[Path]:
    """`kept`, or a folder beside the model that is gone with all copies in it afterwards.

    Raises ConfigError where it can't be written, or the copies would not fit on the disk.
    """
    sizes = [size_of(model, quant) for quant in quants if not (kept and (kept / name_of(model.path, quant)).is_file())]
    folder = kept or model.path.resolve().parent
    if sizes:
        _check_space(folder, sum(sizes) if kept else max(sizes))
    if kept:
        yield kept
        return
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".racer-local-", dir=folder, ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(f"{folder} can't be written ({error.strerror}); name another with --quants-dir") from error
    with scratch:
        yield Path(scratch.name)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"the copies take up to {needed / 1e9:.2f} GB and {folder} has {free / 1e9:.2f} GB free; "
            f"name another folder with --quants-dir, or fewer --quants"
        )


@dataclass
class Workshop:
    """Makes copies of a model and measures each against the model itself, in the settings of one candidate."""

    model: Model
    config: ModelConfig
    """How the model was loaded."""
    context: ContextConfig
    candidate: Candidate
    trials: Trials
    """Of the model."""
    work: Work
    text: Tokens
    """That next tokens are compared on."""
    folder: Path
    keep: bool
    """Else each copy is removed when it was measured."""
    longest: float
    """Seconds of a sample, at most."""
    on_pair: OnPair = lambda comparison: None

    def measure(self, copy: Copy, budget: Budget) -> None:
        """Make a copy and fill in `copy`; an interrupt leaves what is known so far. Making it does not count."""
        path = self.folder / name_of(self.model.path, copy.quant)
        try:
            if not path.is_file():
                with budget.paused():
                    quantize(self.model.path, path, copy.quant)
            copy.bytes, copy.path = path.stat().st_size, path if self.keep else None
            with Model(path, self.config) as other:
                self._compare(copy, other, budget)
        except ModelError as error:
            copy.failed = str(error)
        finally:
            if not self.keep:
                _drop(path)

    def _compare(self, copy: Copy, other: Model, budget: Budget) -> None:
        challenger = replace(self.candidate, quant=copy.quant)
        copy.agreement = agreement(self.model, other, config_of(self.candidate, self.context), self.text)
        copy.comparison = Comparison(self.candidate, challenger)
        with Trials(other, self.context, self.work, self.longest) as others:
            others.figures[challenger] = copy.figures

            def measure(candidate: Candidate, least: float) -> float:
                return (others if candidate.quant else self.trials).measure(candidate, least)

            compare(copy.comparison, measure, budget, self.on_pair)
        copy.failed = copy.comparison.failed


def _drop(path: Path) -> None:
    """The copy, and what was measured of its verifying."""
    if path.is_file():
        when = path.stat().st_mtime_ns
        path.unlink()
        remembered.forget(
            cost.KIND, cost.FORMAT, lambda facts: facts.get("model") == path.name and facts.get("modified") == when
        )


def agreement(model: Model, copy: Model, context: ContextConfig, text: Tokens) -> Agreement:
    """Both read the same text; each predicts the token behind every position of it."""
    same, divergence = 0, 0.0
    context = replace(context, n_ctx=len(text) + PROMPT_ROWS)
    with LlamaTarget(model, context, max_nodes=2) as ours, LlamaTarget(copy, context, max_nodes=2) as theirs:
        for end in range(PROMPT_ROWS, len(text) + PROMPT_ROWS, PROMPT_ROWS):
            pairs = zip(_rows(ours, text[:end]), _rows(theirs, text[:end]), strict=True)
            for mine, other in pairs:
                same += int(mine.argmax() == other.argmax())
                divergence += _divergence(mine, other)
    return Agreement(len(text), same, divergence / max(1, len(text)))


def _rows(target: LlamaTarget, text: Tokens) -> NDArray[np.float32]:
    """Of the tokens that are not in the cache yet."""
    found: list[NDArray[np.float32]] = []
    target.prefill(text, lambda tokens, rows: found.append(rows.copy()))
    return np.concatenate(found)


def _divergence(p: NDArray[np.float32], q: NDArray[np.float32]) -> float:
    """KL(p || q) of two rows of logits, in nats."""
    mine, other = _log_probs(p), _log_probs(q)
    return max(0.0, float(np.sum(np.exp(mine) * (mine - other))))


def _log_probs(row: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = row.astype(np.float64) - float(row.max())
    return np.asarray(shifted - math.log(float(np.exp(shifted).sum())))
