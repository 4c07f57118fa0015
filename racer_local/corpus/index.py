"""What a user does with an index: build, add, remove, clear. One writer at a time; readers are never in the way."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import time_ns

import numpy as np

from racer_local.config import cache_home
from racer_local.corpus.sorting import MOST_TOKENS
from racer_local.corpus.store import File, Part, Store, write_store
from racer_local.errors import CorpusError
from racer_local.kernels.history import BREAK
from racer_local.kernels.suffixes import MOST_SEGMENTS
from racer_local.text import VocabularyId
from racer_local.tree import Tokens

SMALL_SEGMENT = 1 << 18
"""Tokens that are sorted anew without a thought: less than a tenth of a second."""
PATIENCE_S = 600
"""Seconds to wait for another writer of the same index."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """The only writer of an index; the lock of a process that is killed is free again.

    Raises CorpusError where another one does not come to its end.
    """
    from filelock import FileLock, Timeout

    folder = cache_home() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    try:
        with FileLock(folder / f"{name}.lock", timeout=PATIENCE_S):
            yield
    except Timeout:
        raise CorpusError(
            f"another process has been writing {path} for {PATIENCE_S} seconds; try again later"
        ) from None


def create(path: Path, vocabulary: VocabularyId, part: Part) -> None:
    """A new index of this text, in the place of an old one if there is any."""
    with writing(path):
        write_store(path, vocabulary, [], [part] if len(part.tokens) else [])


def add(path: Path, vocabulary: VocabularyId, part: Part) -> None:
    """Put more text into an index. Files that were in it are replaced.

    Small segments at its end are sorted together with the new text, so that there are never many: each is at least
    twice as large as the next, or larger than SMALL_SEGMENT. Raises CorpusError where the index is of another
    vocabulary.
    """
    with writing(path):
        _add(path, vocabulary, part)


def remove(path: Path, names: Collection[str]) -> list[File]:
    """Take the files of these names, and those in folders of these names, out of an index; returns them."""
    with writing(path):
        store = Store(path)
        gone = [file for file in store.all_files if _is_named(file.name, names)]
        if gone:
            kept, parts = _without(store, {file.name for file in gone})
            _write(path, store.vocabulary, kept, parts)
        return gone


def clear(path: Path) -> int:
    """Forget everything that an index holds, and return how many tokens that was. It can be added to again."""
    with writing(path):
        store = Store(path)
        write_store(path, store.vocabulary, [], [])
        return store.n_tokens


def remember(path: Path, vocabulary: VocabularyId, answers: Sequence[Tokens], ends: Collection[int]) -> None:
    """Add answers, as tokens, to an index, which is made if it is not there. What are `ends` is left out."""
    texts = [np.asarray(answer, np.int32) for answer in answers if len(answer)]
    texts = [np.append(np.where(np.isin(text, list(ends)), np.int32(BREAK), text), np.int32(BREAK)) for text in texts]
    if not texts:
        return
    with writing(path):
        now = time_ns()
        files = [File(f"answer {now}.{number}", 0, now, len(text)) for number, text in enumerate(texts)]
        part = Part(np.concatenate(texts), files)
        if path.exists():
            _add(path, vocabulary, part)
        else:
            write_store(path, vocabulary, [], [part])


def _add(path: Path, vocabulary: VocabularyId, part: Part) -> None:
    store = Store(path, vocabulary)
    kept, parts = _without(store, {file.name for file in part.files})
    _write(path, store.vocabulary, kept, [*parts, part] if len(part.tokens) else parts)


def _is_named(name: str, names: Collection[str]) -> bool:
    return name in names or any(name.startswith(folder.rstrip(os.sep) + os.sep) for folder in names)


def _without(store: Store, names: Collection[str]) -> tuple[list[tuple[Store, int]], list[Part]]:
    """The segments that hold none of these files, and what is left of the others."""
    kept, parts = [], []
    for number in range(store.n_segments):
        if any(file.name in names for file in store.files(number)):
            parts.append(_drop(store.part(number), names))
        else:
            kept.append((store, number))
    return kept, [part for part in parts if part.files]


def _drop(part: Part, names: Collection[str]) -> Part:
    """A part without these files. Its order, where it is known, is that of what is left."""
    stays = np.array([file.name not in names for file in part.files], np.bool_)
    keep = np.repeat(stays, np.diff(part.starts))
    order = None
    if part.order is not None:
        place = np.cumsum(keep, dtype=np.int32) - np.int32(1)
        order = place[part.order[keep[part.order]]]
    files = [file for file, stay in zip(part.files, stays.tolist(), strict=True) if stay]
    return Part(np.ascontiguousarray(part.tokens[keep]), files, order)


def _write(path: Path, vocabulary: VocabularyId, kept: list[tuple[Store, int]], parts: list[Part]) -> None:
    """Write an index anew, the small segments joined with the new parts."""
    large = [part for part in parts if part.order is not None and len(part.tokens) > SMALL_SEGMENT]
    small = [part for part in parts if part not in large]
    size = sum(len(part.tokens) for part in small)
    kept = sorted(kept, key=lambda place: -_length(place))
    while small and kept:
        crowded = len(kept) + len(large) + 1 > MOST_SEGMENTS
        fits = size + _length(kept[-1]) <= MOST_TOKENS
        if not (fits and (crowded or _length(kept[-1]) <= max(SMALL_SEGMENT, 2 * size))):
            break
        store, number = kept.pop()
        small.append(store.part(number))
        size += len(small[-1].tokens)
    write_store(path, vocabulary, kept, [*large, *([Part.join(small)] if small else [])])


def _length(place: tuple[Store, int]) -> int:
    store, number = place
    return store.length(number)
