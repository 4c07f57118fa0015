"""From files to the text of an index: order, caps, breaks between documents; no control token comes from a file."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter

import numpy as np
import pytest
from indexes import content
from memories import VOCABULARY
from tiny_gguf import BOS, EOS, UNK, write_tiny_gguf

from racer_local.corpus import build, files
from racer_local.corpus.build import BEYOND_CAP, collect, estimate
from racer_local.corpus.files import pieces, walk
from racer_local.corpus.index import create
from racer_local.corpus.store import Store
from racer_local.kernels.history import BREAK


class Bytes:
    """Each byte is a token; \\x01 is a control token. Slow at random."""

    def __init__(self, wait=0.0):
        self._wait, self.heard = wait, []

    def plain_tokens(self, text, *, inside=False):
        time.sleep(self._wait * random.random())
        self.heard.append((text, inside))
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        return np.where(ids == 1, np.int32(BREAK), ids + np.int32(1))


def ids(text):
    return [BREAK if byte == 1 else byte + 1 for byte in text.encode()]


def plant(folder, texts):
    for name, text in texts.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def collected(folder, tokenizer=None, *, chat=True, max_tokens=None):
    """The tokens, name -> tokens with its last BREAK, and what was skipped."""
    skipped = Counter()
    found = walk([folder], max_bytes=1 << 30, skipped=skipped)
    part = collect(found, tokenizer or Bytes(), folder, chat=chat, max_tokens=max_tokens, skipped=skipped)
    texts, at = {}, 0
    for file in part.files:
        texts[file.name.rsplit("/", 1)[-1]] = part.tokens[at : at + file.tokens].tolist()
        at += file.tokens
    assert at == len(part.tokens)
    return texts, dict(skipped)


def random_lines(rng, n):
    return "".join(rng.choice(["word ", "x", "\n", "\n\n", "  ", "\n    ", "é", "語", "🙂", "\t"]) for _ in range(n))


def test_files_come_in_their_order_whatever_the_threads_do(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 50)
    rng = random.Random(0)
    texts = {f"{number:03}": f"{number}" + random_lines(rng, rng.randrange(300)) for number in range(60)}
    got, skipped = collected(plant(tmp_path, texts), Bytes(wait=0.002))
    assert [*got] == [*texts]
    assert got == {name: [*ids(text), BREAK] for name, text in texts.items()}
    assert skipped == {}


def test_a_part_becomes_an_index_with_the_files_sizes_and_times(tmp_path):
    plant(tmp_path, {"a": "abc", "b": "x\x01y"})
    found = list(walk([tmp_path], max_bytes=99, skipped=Counter()))
    part = collect(found, Bytes(), tmp_path, chat=False, max_tokens=None, skipped=Counter())
    create(tmp_path / "i", VOCABULARY, part)
    store = Store(tmp_path / "i")
    assert content(store) == {str(tmp_path / "a"): ids("abc"), str(tmp_path / "b"): ids("x\x01y")}
    assert [file[:3] for file in store.all_files] == [(str(one.path), one.size, one.modified) for one in found]


def test_no_file_at_all_is_an_empty_part_and_leaves_nothing(tmp_path):
    plant(tmp_path, {"a": b"\0", "b": " \n"})
    assert collected(tmp_path) == ({}, {files.BINARY: 1, files.EMPTY: 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("cap", [*range(1, 27)])
def test_a_cap_is_kept_to_the_token_and_what_is_beyond_is_counted(tmp_path, cap):
    texts = {"a": "123456789", "b": "12345", "c": "1234", "d": "12"}
    got, skipped = collected(plant(tmp_path, texts), max_tokens=cap)
    total = sum(map(len, got.values()))
    expected, left = {}, cap
    for name in texts:
        if left >= 2:
            expected[name] = [*ids(texts[name])[: left - 1], BREAK]
            left -= len(expected[name])
        else:
            left = 0
    assert got == expected
    assert total == min(cap, 24) or cap - total == 1
    assert skipped == ({BEYOND_CAP: 4 - len(got)} if len(got) < 4 else {})


@pytest.mark.parametrize("size", [100, 5000])
def test_a_file_that_turns_out_to_be_no_text_leaves_nothing(tmp_path, monkeypatch, size):
    """However late, and however much of it was read ahead."""
    monkeypatch.setattr(files, "BLOCK", 50)
    bad = b"abc def\n" * size
    plant(tmp_path, {"a": "first", "b": bad + b"\0", "c": "second", "d": bad + b"\xff", "e": "third"})
    got, skipped = collected(tmp_path)
    assert got == {name: [*ids(text), BREAK] for name, text in {"a": "first", "c": "second", "e": "third"}.items()}
    assert skipped == {files.BINARY: 1, files.NOT_UTF8: 1}


@pytest.mark.parametrize("lines", range(28, 44))
def test_a_file_that_turns_out_to_be_no_text_takes_no_room_from_those_behind_it(tmp_path, monkeypatch, lines):
    """It fills the cap while it is read ahead; unless it is cut there before its end is seen, the next file fits."""
    monkeypatch.setattr(files, "BLOCK", 50)
    plant(tmp_path, {"a": (b"x" * 49 + b"\n") * lines + b"\0", "b": "second"})
    got, skipped = collected(tmp_path, max_tokens=60)
    assert list(got) in (["a"], ["b"])
    assert skipped == ({files.BINARY: 1} if "b" in got else {BEYOND_CAP: 1})


def test_messages_do_not_run_into_each_other_nor_files(tmp_path):
    log = [{"role": "user", "content": "one"}, {"messages": [{"role": "user", "content": text} for text in ("2", "3")]}]
    plant(tmp_path, {"a.jsonl": "\n".join(map(json.dumps, log)), "b": "four"})
    got, _ = collected(tmp_path)
    assert got == {"a.jsonl": [*ids("one\x012\x013"), BREAK], "b": [*ids("four"), BREAK]}
    got, _ = collected(tmp_path, chat=False)
    assert got["a.jsonl"][:-1] == ids((tmp_path / "a.jsonl").read_text())


def test_only_what_goes_on_is_tokenized_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 8)
    tokenizer = Bytes()
    collected(plant(tmp_path, {"a": "1234567\n" * 3, "b": "123"}), tokenizer)
    assert sorted(tokenizer.heard) == sorted([("1234567\n", False), *[("1234567\n", True)] * 2, ("123", False)])


def test_an_estimate_is_right_within_a_factor_of_two(tmp_path):
    rng = random.Random(0)
    plant(tmp_path, {f"{number:03}": "w" + random_lines(rng, rng.randrange(5000)) for number in range(100)})
    plant(tmp_path, {"x": b"\0"})
    found = list(walk([tmp_path], max_bytes=1 << 30, skipped=Counter()))
    size = estimate(found, Bytes(), chat=False, max_tokens=None)
    texts, _ = collected(tmp_path)
    true = sum(map(len, texts.values()))
    assert true / 2 < size.tokens < 2 * true
    assert (size.files, size.bytes) == (101, sum(one.size for one in found))
    assert size.disk >= 8 * size.tokens > size.resident > 0
    assert size.memory == build.BUILDING_BYTES * size.tokens
    assert estimate(found, Bytes(), chat=False, max_tokens=7).tokens == 7
    assert estimate([], Bytes(), chat=False, max_tokens=None).tokens == 0


# With real vocabularies


def joined(vocabulary, path):
    """The tokens of a file that is read in pieces."""
    (found,) = walk([path], max_bytes=1 << 30, skipped=Counter())
    read = pieces(found, chat=False, skipped=Counter())
    return np.concatenate([vocabulary.plain_tokens(piece.text, inside=not piece.begins) for piece in read]).tolist()


def check_no_control_token(vocabulary, path):
    special = {token for token in range(vocabulary.n_vocab) if vocabulary.is_special(token)} | vocabulary.end_tokens
    spelled = [vocabulary.piece(token, special=True).decode("utf-8", "replace") for token in sorted(special)]
    assert any(spelled)
    path.write_text("".join(f"a {text} b{text}{text}\n{text}\n" for text in spelled), encoding="utf-8")
    assert special & {*vocabulary.tokenize(path.read_text(), parse_special=True)}
    got, _ = collected(path.parent, vocabulary)
    assert not special & {*got[path.name]}
    assert len(got[path.name]) > 4 * len(spelled)


def check_pieces_join(vocabulary, path, monkeypatch, rounds, block=400):
    monkeypatch.setattr(files, "BLOCK", block)
    rng, cut = random.Random(0), 0
    for _ in range(rounds):
        text = "w" + "\n".join(random_lines(rng, rng.randrange(12)).replace("\n", " ") + "end." for _ in range(80))
        path.write_text(text, encoding="utf-8")
        assert joined(vocabulary, path) == vocabulary.plain_tokens(text).tolist()
        cut += len(text) > 2 * block
    assert cut > 0


def test_a_file_that_spells_control_tokens_gives_none(tmp_path, tiny):
    check_no_control_token(tiny, tmp_path / "a")


def test_a_control_token_that_comes_out_all_the_same_is_a_break(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "_tokens_of", lambda *_: np.array([5, BOS, 6, EOS, UNK], np.int32))
    assert tiny.plain_tokens("x").tolist() == [5, BREAK, 6, BREAK, BREAK]


def test_the_fingerprint_tells_vocabularies_apart_and_not_files(tmp_path, tiny, tiny_path):
    from racer_local.llama.vocabulary import Vocabulary

    shutil.copy(tiny_path, tmp_path / "copy.gguf")
    write_tiny_gguf(tmp_path / "quant.gguf", seed=1, quant="F16")
    write_tiny_gguf(tmp_path / "other.gguf", n_vocab=321)
    same = [Vocabulary(tmp_path / name).id for name in ("copy.gguf", "quant.gguf")]
    assert {one.fingerprint for one in same} == {tiny.fingerprint}
    assert [one.model for one in same] == [str(tmp_path / "copy.gguf"), str(tmp_path / "quant.gguf")]
    assert Vocabulary(tmp_path / "other.gguf").fingerprint != tiny.fingerprint


@pytest.fixture(scope="module")
def words(smollm2_path):
    """SmolLM2's vocabulary alone."""
    from racer_local.llama.vocabulary import Vocabulary

    with Vocabulary(smollm2_path) as vocabulary:
        yield vocabulary


@pytest.mark.model
def test_a_file_that_spells_a_real_vocabularys_control_tokens_gives_none(tmp_path, words):
    check_no_control_token(words, tmp_path / "a")


@pytest.mark.model
def test_pieces_of_a_text_have_the_tokens_of_the_whole(tmp_path, words, monkeypatch):
    check_pieces_join(words, tmp_path / "a", monkeypatch, 40)


@pytest.mark.model
def test_several_threads_tokenize_at_once(tmp_path, words, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 200)
    rng = random.Random(0)
    texts = {f"{i:02}": "w" + random_lines(rng, 500).replace("\n", ".\nw") for i in range(40)}
    got, _ = collected(plant(tmp_path, texts), words)
    assert got == {name: [*words.plain_tokens(text).tolist(), BREAK] for name, text in texts.items()}
