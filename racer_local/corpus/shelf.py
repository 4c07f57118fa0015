"""The indexes of an opened model: which of them an answer reads, and the one that its answers are added to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from racer_local.corpus.corpora import Corpora, Notify
from racer_local.corpus.index import remember
from racer_local.corpus.store import Store
from racer_local.errors import ConfigError, RacerError
from racer_local.text import VocabularyId
from racer_local.tree import Tokens

KEPT = 8
"""Sets of indexes that stay open."""


def check_indexes(paths: Sequence[str]) -> None:
    """Raises CorpusError where one can't be read, which is better known before a model is loaded than after it."""
    for path in paths:
        Store(Path(path).expanduser()).close()


class Shelf:
    """Sets of indexes, opened when they are first asked for."""

    def __init__(self, vocabulary: Callable[[], VocabularyId], ends: Collection[int], notify: Notify) -> None:
        self._vocabulary, self._ends, self._notify = vocabulary, ends, notify
        self._open: dict[tuple[tuple[str, ...], str | None], Corpora] = {}

    def corpora(self, paths: tuple[str, ...], own: str | None) -> Corpora | None:
        """These indexes and the one of own answers, which need not be there yet; None where none is named.

        Raises CorpusError where one can't be used, ConfigError where the one of own answers can't be made.
        """
        if not paths and own is None:
            return None
        key = paths, own
        if key not in self._open:
            if own is not None and not Path(own).expanduser().parent.is_dir():
                raise ConfigError(f"{own} can't be written; name a file in a folder that exists (--remember)")
            opened = Corpora(paths, self._vocabulary(), self._notify, own)
            for old in [*self._open][: max(0, len(self._open) - KEPT + 1)]:
                del self._open[old]
            self._open[key] = opened
        return self._open[key]

    def remember(self, path: str, answers: Sequence[Tokens]) -> None:
        """Add answers to an index. What goes wrong is a notice: the answers have been given."""
        try:
            remember(Path(path).expanduser(), self._vocabulary(), answers, self._ends)
        except (RacerError, OSError) as error:
            self._notify(f"the answer was not added to {path}: {error}")
