"""Prompt lookup, for comparison: copy what followed the last occurrence of the text's end, as a chain."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from racer_local.config import DraftConfig
from racer_local.draft.sources import DraftSource, Text
from racer_local.kernels import layout
from racer_local.kernels.layout import Scratch
from racer_local.kernels.lookup import find_continuation
from racer_local.tree import Int32s, NodeIds, Source


class PromptLookup(DraftSource):
    """Suffixes of `config.lookup_ngram` down to one token are looked up in this conversation's text."""

    def __init__(self, config: DraftConfig, banned: NDArray[np.bool_]) -> None:
        self.longest, self.banned = config.lookup_ngram, banned

    def begin(self, prompt: Int32s) -> None:
        self.text = Text()
        self.text.extend(prompt)

    def accept(self, path: NodeIds, tokens: Int32s) -> None:
        self.text.extend(tokens)

    def grow(self, tree: Scratch) -> None:
        text = self.text.tokens
        at = find_continuation(text, len(text), self.longest)
        node = 0
        for token in text[at : at + tree.limit[0]].tolist() if at >= 0 else ():
            node = -1 if self.banned[token] else layout.add(tree, node, token, int(Source.CONTEXT))
            if node < 0:
                break
