"""A caller's own guesser, of the shape that llama-cpp-python's draft models have."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from racer_local.draft import TopK
from racer_local.tree import DraftTree, Int32s, Limit, NodeIds, Tokens


class GivenDrafts:
    """Chains of what `guess` returns for the text so far, cut before an end token."""

    breadth = 0
    prompt_rows: int | None = 0

    def __init__(self, guess: Callable[[Int32s], Int32s], end_tokens: Collection[int]) -> None:
        self._guess, self._end_tokens = guess, end_tokens
        self._drafted = DraftTree.lone(0)

    def begin(self, prompt: Tokens) -> None:
        self._text: Int32s = np.array(prompt, np.int32)

    def draft(self, root: int, limit: Limit) -> DraftTree:
        guesses = np.asarray(self._guess(self._text), np.int32).ravel()[: min(limit.nodes - 1, limit.depth)]
        ends = np.flatnonzero(np.isin(guesses, list(self._end_tokens)))
        chain = [root, *guesses[: ends[0] if len(ends) else None].tolist()]
        self._drafted = DraftTree.chain(chain)
        return self._drafted

    def observe(self, tree: DraftTree, top_k: TopK) -> None: ...

    def accept(self, path: NodeIds, bonus: int) -> None:
        self._text = np.concatenate([self._text, self._drafted.tokens[path[1:]], np.array([bonus], np.int32)])
