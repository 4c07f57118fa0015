"""The Target protocol, the model whose output must not change, and the Sampler that draws from its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from racer_local.tree import DraftTree, NodeIds, Tokens

Rows = NDArray[np.float32]
"""[n, vocabulary] logits, one row a node; a view of the target's own memory, valid until its next forward."""

OnRows = Callable[[Tokens, Rows], None]


def never() -> bool:
    """The `cancelled` of a caller that never cancels."""
    return False


@dataclass(frozen=True)
class Exactness:
    """How far a row of a batch equals the row of a single token, to the bit."""

    rows: int
    """In trees of up to so many nodes; 1: in none."""
    branches: bool
    """In trees with several leaves too, and in prompts of any length."""


class Target(Protocol):
    """A model with a cache. It knows nothing of drafters."""

    n_vocab: int
    n_ctx: int
    """Tokens of prompt and answer that fit."""
    max_nodes: int
    """Nodes of the largest tree that `evaluate` takes."""
    max_leaves: int
    """Leaves of the largest tree that `evaluate` takes; 1 for a memory that can't branch."""

    def prefill(
        self,
        tokens: Tokens,
        on_rows: OnRows | None = None,
        cancelled: Callable[[], bool] = never,
        last: int | None = None,
    ) -> int:
        """Make the cache hold exactly `tokens`, in chunks; returns how many it already held.

        `on_rows` sees each evaluated chunk and its logits; with `last` only the last so many tokens, since logits
        have their price. `cancelled` is asked before each chunk, and within it where that is possible; when true the
        cache holds what was evaluated so far.
        """
        ...

    def evaluate(self, tree: DraftTree) -> Rows:
        """One forward of the whole tree behind the cached text: one row a node, no copy."""
        ...

    def commit(self, path: NodeIds) -> None:
        """Keep this path of the evaluated tree in the cache, drop the rest.

        An empty path drops all, and is no error where nothing was evaluated.
        """
        ...


class Sampler(Protocol):
    """The full sampler chain; its state sees only the prompt and emitted tokens, in order."""

    def begin(self, prompt: Tokens) -> None: ...

    def draw(self, logits: NDArray[np.float32]) -> int:
        """The next token after the row `logits`, [vocabulary]; one draw, noted as emitted."""
        ...
