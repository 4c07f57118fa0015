"""Indexes of small texts, and what a file holds, as plain Python has it."""

from __future__ import annotations

from memories import VOCABULARY, random_text, tokens

from racer_local.corpus.store import File, Part, Store, write_store
from racer_local.kernels import suffixes
from racer_local.kernels.history import BREAK


def part(texts):
    """A part of name -> tokens, BREAK between documents; one more comes behind each file."""
    files = [File(name, 4 * len(text), 7, len(text) + 1) for name, text in texts.items()]
    return Part(tokens([token for text in texts.values() for token in [*text, BREAK]]), files)


def store_of(path, *segments):
    """An open index with these segments, each name -> tokens."""
    write_store(path, VOCABULARY, [], [part(texts) for texts in segments])
    return Store(path, VOCABULARY)


def index_of(store):
    """For `suffixes.find`, as long as the store lives."""
    return suffixes.as_index(store.places, store.resident("directory"), store.resident("starts"))


def content(store):
    """Name -> tokens, as `part` takes them."""
    held = {}
    for number in range(store.n_segments):
        segment = store.segment(number)
        for i, file in enumerate(store.files(number)):
            text = segment.tokens[segment.starts[i] : segment.starts[i + 1]].tolist()
            assert file.name not in held
            assert text[-1] == BREAK
            assert len(text) == file.tokens
            held[file.name] = text[:-1]
    return held


def random_texts(rng, names, length=100, n_vocab=4, breaks=0.05):
    return {name: random_text(rng, int(rng.integers(1, length + 1)), n_vocab, breaks) for name in names}
