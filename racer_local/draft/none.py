"""Drafts nothing: with it the engine's loop is plain decoding."""

from __future__ import annotations

from racer_local.draft import TopK
from racer_local.tree import DraftTree, Limit, NodeIds, Tokens


class NoDrafter:
    breadth = 0
    prompt_rows: int | None = 0

    def begin(self, prompt: Tokens) -> None: ...

    def draft(self, root: int, limit: Limit) -> DraftTree:
        return DraftTree.lone(root)

    def observe(self, tree: DraftTree, top_k: TopK) -> None: ...

    def accept(self, path: NodeIds, bonus: int) -> None: ...
