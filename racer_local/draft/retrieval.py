"""The retrieval tree: reliable anchors from the text seen so far (paper, section 3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from racer_local.config import DraftConfig
from racer_local.draft.sources import DraftSource, Text
from racer_local.kernels import automaton
from racer_local.kernels.layout import Scratch
from racer_local.tree import Int32s, NodeIds, Source


class NgramTrie(DraftSource):
    """The n-grams of the running text and of earlier ones, bounded; see `kernels.automaton`.

    A prompt that goes on from the running text (the next turn of a chat) is counted from where it differs.
    """

    def __init__(self, config: DraftConfig, banned: NDArray[np.bool_]) -> None:
        self.banned = banned
        self.trie = automaton.new_trie(config.trie_nodes, config.ngram)
        self.text = Text()
        self._heap = automaton.new_heap(config.trie_nodes)
        self._places = np.zeros((config.nodes, config.ngram), np.int32)

    def begin(self, prompt: Int32s) -> None:
        shared = self.text.shared_prefix(prompt)
        if shared < self.text.length:
            self.text.cut(shared)
            automaton.seek(self.trie, prompt[:shared])
        self._extend(prompt[shared:])

    def accept(self, path: NodeIds, tokens: Int32s) -> None:
        self._extend(tokens)

    def grow(self, tree: Scratch) -> None:
        automaton.propose(self.trie, self.banned, tree, int(Source.CONTEXT), self._heap, self._places)

    def _extend(self, tokens: Int32s) -> None:
        self.text.extend(tokens)
        automaton.append(self.trie, np.ascontiguousarray(tokens))
