"""Prompt lookup, for comparison: copy what followed the last occurrence of the text's end, as a chain."""

from __future__ import annotations

from racer_local.draft.base import Text, TreeDrafter
from racer_local.kernels import layout
from racer_local.kernels.lookup import find_continuation
from racer_local.tree import Int32s, Source


class LookupDrafter(TreeDrafter):
    """Suffixes of `config.lookup_ngram` down to one token are looked up in this conversation's text."""

    def _begin(self, prompt: Int32s) -> None:
        self.text = Text()
        self.text.extend(prompt)

    def _extend(self, tokens: Int32s) -> None:
        self.text.extend(tokens)

    def _grow(self) -> None:
        text = self.text.tokens
        at = find_continuation(text, len(text), self.config.lookup_ngram)
        node = 0
        for token in text[at:].tolist() if at >= 0 else ():
            node = -1 if self.banned[token] else layout.add(self.tree, node, token, Source.CONTEXT)
            if node < 0:
                break
