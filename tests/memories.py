"""Texts, nets, indexes and memories (history, cues, recent, evidence, net, index) made at random."""

from __future__ import annotations

import numpy as np

from racer_local.corpus.corpora import Corpora
from racer_local.corpus.index import create
from racer_local.corpus.store import File, Part
from racer_local.kernels import acceptance, evidence, history, keyed_cues
from racer_local.kernels.evidence import NODE_FEATURES, TOKEN_FEATURES
from racer_local.kernels.history import BREAK, CONTEXT
from racer_local.kernels.suffixes import NO_INDEX
from racer_local.text import VocabularyId


def tokens(values):
    return np.array(values, np.int32)


def random_text(rng, length, n_vocab, breaks=0.05):
    """Half of it is said again."""
    text = []
    while len(text) < length:
        if text and rng.random() < 0.2:
            start = int(rng.integers(len(text)))
            text += text[start : start + int(rng.integers(1, 25))]
        else:
            text.append(BREAK if rng.random() < breaks else int(rng.integers(n_vocab)))
    return text[:length]


def context_after(text):
    """[CONTEXT] the end of a text, BREAK before its start."""
    return tokens(([BREAK] * CONTEXT + list(text))[-CONTEXT:])


def random_row(rng, k, n_vocab):
    """Ids and log probabilities [k], likeliest first; some rows are shorter."""
    n = k if rng.random() < 0.7 else int(rng.integers(1, k + 1))
    ids = np.full(k, -1, np.int32)
    ids[:n] = rng.permutation(n_vocab)[:n]
    logits = np.full(k, -np.inf, np.float32)
    logits[:n] = -np.sort(-rng.normal(size=n) * 3)
    log_probs = np.empty_like(logits)
    keyed_cues.log_softmax(logits, log_probs)
    return ids, log_probs


def random_net(rng, hidden=8, bias=1.0):
    return acceptance.new_net(
        rng.normal(0, 0.1, (len(NODE_FEATURES), hidden)).astype(np.float32),
        rng.normal(0, 0.1, (len(TOKEN_FEATURES), hidden)).astype(np.float32),
        rng.normal(bias, 0.3, hidden).astype(np.float32),
        rng.normal(0, 0.6, hidden + 1).astype(np.float32),
    )


VOCABULARY = VocabularyId("fingerprint", 1000, "some.gguf")


def part_of(*texts):
    """A part of files that hold one document each."""
    files = [File(f"/file {number}", 4 * len(text), 0, len(text) + 1) for number, text in enumerate(texts)]
    return Part(tokens([token for text in texts for token in [*text, BREAK]]), files)


def corpora_of(folder, *indexes):
    """Open indexes, each of some texts, that lie in a folder."""
    paths = [folder / f"{number}.index" for number in range(len(indexes))]
    for path, texts in zip(paths, indexes, strict=True):
        create(path, VOCABULARY, part_of(*texts))
    return Corpora(paths, VOCABULARY)


def new_memory(net, window=1 << 12, slots=1 << 12, k=4, index=NO_INDEX):
    cues = keyed_cues.new_cues(slots, k)
    return history.new_history(window), cues, evidence.new_recent(), evidence.new_evidence(k), net, index


def random_memory(rng, length=400, n_vocab=30, k=4, breaks=0.05, index=NO_INDEX):
    """A memory of a text, with cues for about half of its places; and the text. Few units of its net are ever 0."""
    memory = new_memory(random_net(rng, bias=3), k=k, index=index)
    text = random_text(rng, length, n_vocab, breaks)
    history.append(memory[0], tokens(text))
    for end in np.flatnonzero(rng.random(length) < 0.5) + 1:
        keyed_cues.put(memory[1], context_after(text[:end]), *random_row(rng, k, n_vocab), np.int64(end))
    recent = memory[2]
    recent.averages[:] = rng.random(len(recent.averages))
    recent.start[:] = rng.integers(length), rng.integers(100)
    recent.last[:] = rng.random(2)
    return memory, text
