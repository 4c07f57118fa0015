"""Recorded answers: what a model said, and its likeliest next tokens after each token."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from racer_local.errors import ConfigError
from racer_local.tree import Int32s


@dataclass(frozen=True, eq=False)
class Trace:
    """Conversations end to end, N tokens in all; the arrays of an .npz file."""

    tokens: Int32s
    """[N] prompt and answer tokens."""
    offsets: NDArray[np.int64]
    """[C + 1] conversation c is tokens[offsets[c]:offsets[c + 1]]."""
    topk_ids: Int32s
    """[N, k] the likeliest next tokens after each token, likeliest first; -1 where none is recorded."""
    topk_probs: NDArray[np.floating[Any]]
    """[N, k] their softmax probabilities."""
    gen: Int32s
    """[G, 3] (conversation, start, end): the answers, in positions of their conversation."""
    category: NDArray[np.str_]
    """[C]"""

    def answers(self) -> Iterator[list[int]]:
        """[conversation, start, end] of each answer."""
        yield from self.gen.tolist()

    @property
    def n_vocab(self) -> int:
        """At least as many token ids as the trace names."""
        return int(max(self.tokens.max(initial=0), self.topk_ids.max(initial=0))) + 1

    def save(self, path: Path) -> None:
        with path.open("wb") as file:  # given a name, numpy would add .npz to it
            np.savez_compressed(file, **{field.name: getattr(self, field.name) for field in fields(self)})


def load_trace(path: Path) -> Trace:
    """A recorded file, checked. Raises ConfigError where it is none."""
    try:
        if path.is_file() and not zipfile.is_zipfile(path):
            raise ValueError("not an .npz file")
        with np.load(path, allow_pickle=False) as file:
            trace = Trace(**{field.name: file[field.name] for field in fields(Trace)})
        wrong = _what_is_wrong(trace)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from error
    except Exception as error:  # np.load lets through whatever its many parsers raise
        raise ConfigError(f"{path} is no recorded trace ({error}); make one with: racer-local bench record") from error
    if wrong:
        raise ConfigError(f"{path} is no recorded trace: {wrong}; make one with: racer-local bench record")
    return trace


KINDS = {"tokens": "i1", "offsets": "i1", "topk_ids": "i2", "topk_probs": "f2", "gen": "i2", "category": "U1"}
"""Kind of number and dimensions of each array."""
LARGEST_ID = 1 << 22
"""No vocabulary is larger."""


def _what_is_wrong(trace: Trace) -> str | None:
    for name, kind in KINDS.items():
        array = getattr(trace, name)
        if f"{array.dtype.kind}{array.ndim}" != kind:
            return f"{name} has the type {array.dtype} and {array.ndim} dimensions"
    n, offsets, gen = len(trace.tokens), trace.offsets, trace.gen
    if trace.topk_ids.shape != trace.topk_probs.shape or len(trace.topk_ids) != n or not trace.topk_ids.size:
        return f"topk_ids {trace.topk_ids.shape} and topk_probs {trace.topk_probs.shape} must be [{n}, k]"
    if trace.topk_ids.min() < -1 or trace.n_vocab > LARGEST_ID:
        return f"the ids in topk_ids must be from -1 to {LARGEST_ID - 1}"
    if not ((trace.topk_probs >= 0) & (trace.topk_probs <= 1)).all():
        return "topk_probs must be from 0 to 1"
    if len(offsets) != len(trace.category) + 1 or offsets[0] != 0 or offsets[-1] != n or (np.diff(offsets) < 1).any():
        return "offsets must rise from 0 to the number of tokens, one more than there are categories"
    if gen.shape != (len(gen), 3) or not len(gen) or (np.diff(gen[:, 0]) < 0).any():
        return "gen must be [G, 3], in the order of the conversations"
    if (trace.tokens < 0).any():
        return "a token id is below 0"
    lengths = np.diff(offsets)
    if gen[:, 0].min() < 0 or gen[:, 0].max() >= len(lengths):
        return "gen names a conversation that is not there"
    same = gen[1:, 0] == gen[:-1, 0]
    if (gen[1:, 1] < gen[:-1, 2])[same].any():
        return "two answers in gen overlap"
    if (gen[:, 1] < 1).any() or (gen[:, 2] < gen[:, 1]).any() or (gen[:, 2] > lengths[gen[:, 0]]).any():
        return "an answer in gen lies outside its conversation, or has no prompt"
    return None
