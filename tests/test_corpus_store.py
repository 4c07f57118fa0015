"""The file of an index: what is written is read, and what is damaged is refused with a word that says how."""

from __future__ import annotations

import fcntl
import os
import struct
import zlib

import numpy as np
import pytest
from indexes import content, index_of, part, random_texts, store_of
from memories import VOCABULARY, context_after, random_text, tokens

from racer_local.corpus import store as module
from racer_local.corpus.build import DISK_BYTES
from racer_local.corpus.index import create, writing
from racer_local.corpus.sorting import sort_positions
from racer_local.corpus.store import FORMAT, HEADER, PAGE, File, Part, Store, write_store
from racer_local.errors import CorpusError
from racer_local.kernels import suffixes
from racer_local.kernels.history import BREAK


@pytest.fixture
def path(tmp_path):
    return tmp_path / "an.index"


def written(path, n=3000):
    rng = np.random.default_rng(0)
    write_store(path, VOCABULARY, [], [part({"a": random_text(rng, n, 50), "b": random_text(rng, n, 3)})])
    return path


def places(path):
    return Store(path)._table.segments[0]


def refusal(path, wanted=None):
    with pytest.raises(CorpusError) as caught:
        Store(path, wanted)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_what_is_written_is_read(path):
    rng = np.random.default_rng(0)
    segments = [random_texts(rng, [f"/{number}/{i}" for i in range(number + 1)], 400, 9) for number in range(3)]
    store = store_of(path, *segments)
    assert content(store) == {name: text for segment in segments for name, text in segment.items()}
    assert store.vocabulary == VOCABULARY
    assert store.n_tokens == sum(len(text) + 1 for segment in segments for text in segment.values())
    for number, texts in enumerate(segments):
        segment, new = store.segment(number), part(texts)
        assert store.files(number) == new.files
        assert segment.starts.tolist() == new.starts.tolist()
        assert segment.order.tolist() == sort_positions(new.tokens).tolist()
        directory = np.zeros_like(segment.directory)
        suffixes.write_directory(segment.tokens, segment.order, directory)
        assert segment.directory.tolist() == directory.tolist() == store.resident("directory")[number].tolist()


def test_an_index_of_nothing_is_an_index(path):
    write_store(path, VOCABULARY, [], [])
    store = Store(path, VOCABULARY)
    store.check()
    assert (store.n_segments, store.n_tokens, store.all_files) == (0, 0, [])
    assert suffixes.find(index_of(store), context_after([1]), 1, 0, suffixes.new_found()) == 0


def test_the_owner_alone_can_read_it(path):
    before = os.umask(0)
    try:
        written(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_file_begins_as_documented(path):
    raw = written(path).read_bytes()
    magic, format, crc, at, size = HEADER.unpack(raw[:32])
    assert (magic, format, size) == (b"RACERIDX", 1, len(raw))
    assert crc == zlib.crc32(raw[at:])
    for name, place in places(path).items():
        assert place.at % PAGE == 0 < place.at
        assert place.crc == zlib.crc32(raw[place.at : place.at + place.size * (1 if name == "files" else 4)])


def test_a_file_cut_short_anywhere_is_refused(path):
    raw = written(path).read_bytes()
    for length in [*range(0, 64, 3), *range(64, len(raw), 997), len(raw) - 1]:
        path.write_bytes(raw[:length])
        assert "cut short" in refusal(path)


def test_a_byte_changed_anywhere_that_matters_is_refused(path):
    """What fills the pages up matters to nobody."""
    raw, rng = written(path, 500).read_bytes(), np.random.default_rng(0)
    spots = {"table": (HEADER.unpack(raw[:32])[3], len(raw))}
    for name, place in places(path).items():
        spots[name] = place.at, place.at + place.size * (1 if name == "files" else 4)
    assert spots.keys() == {"table", *module.ARRAYS, "files"}
    for start, end in spots.values():
        for at in rng.integers(start, end, 25).tolist():
            damaged = bytearray(raw)
            damaged[at] ^= 1 << int(rng.integers(8))
            path.write_bytes(damaged)
            assert "is damaged" in refusal(path)
    path.write_bytes(raw)
    Store(path).check()


def test_every_bit_of_the_header_matters(path):
    raw = written(path, 10).read_bytes()
    for bit in range(8 * HEADER.size):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        refusal(path)


def test_a_newer_format_is_refused_by_its_number(path):
    raw = bytearray(written(path).read_bytes())
    raw[8:12] = struct.pack("<I", FORMAT + 1)
    path.write_bytes(raw)
    assert f"has format {FORMAT + 1}, and this version reads up to {FORMAT}; update" in refusal(path)


def test_a_foreign_vocabulary_is_named_by_its_model(path):
    other = VOCABULARY._replace(fingerprint="other", model="/models/other.gguf")
    assert "another vocabulary (that of some.gguf, 1000 tokens)" in refusal(written(path), other)
    Store(path, VOCABULARY._replace(model="/models/copy.gguf"))


def test_what_is_no_index_is_refused_by_what_it_is(tmp_path, path):
    assert "can't be read: No such file" in refusal(path)
    assert "can't be read: Is a directory" in refusal(tmp_path)
    path.write_bytes(b"")
    assert "is no index, or cut short" in refusal(path)
    path.write_bytes(b"GGUF" + bytes(5000))
    assert "is no index of racer-local" in refusal(path)


@pytest.mark.parametrize("array", ["tokens", "order", "directory"])
def test_lost_pages_of_a_large_file_are_found_when_it_is_opened(path, monkeypatch, array):
    """Of one that is not read whole."""
    monkeypatch.setattr(module, "SMALL", 0)
    place, raw = places(written(path, 100_000))[array], bytearray(path.read_bytes())
    half = 2 * place.size // PAGE * PAGE
    raw[place.at + half : place.at + 4 * place.size] = bytes(4 * place.size - half)
    path.write_bytes(raw)
    assert "is damaged" in refusal(path)


def test_a_byte_changed_in_a_large_file_is_found_by_reading_it(path, monkeypatch):
    monkeypatch.setattr(module, "SMALL", 0)
    raw, rng = written(path, 50_000).read_bytes(), np.random.default_rng(0)
    Store(path).check()
    for place in places(path).values():
        damaged = bytearray(raw)
        damaged[place.at + int(rng.integers(place.size))] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CorpusError, match="is damaged"):
            Store(path).check()


def test_damage_does_not_get_into_a_new_file(path, monkeypatch):
    monkeypatch.setattr(module, "SMALL", 0)
    place, raw = places(written(path, 50_000))["order"], bytearray(path.read_bytes())
    raw[place.at + 2 * place.size + 1] ^= 1
    path.write_bytes(raw)
    for kept in (True, False):
        with pytest.raises(CorpusError, match="is damaged"):
            write_store(path, VOCABULARY, *([(Store(path), 0)], []) if kept else ([], [Store(path).part(0)]))
    assert path.read_bytes() == raw
    assert os.listdir(path.parent) == [path.name]


def test_an_index_is_opened_to_be_read_alone_while_somebody_writes_it(tmp_path, path):
    written(path)
    before = path.stat()
    with writing(path):
        store = Store(path)
    assert fcntl.fcntl(store.places[0][0], fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert os.listdir(tmp_path) == [path.name]


def test_an_open_index_is_in_nobodys_way(path):
    store = Store(written(path))
    before = content(store)
    create(path, VOCABULARY, part({"c": [1, 2]}))
    assert content(Store(path)) == {"c": [1, 2]}
    assert content(store) == before


def test_a_token_takes_at_most_nine_bytes_of_the_disk(path):
    rng, n = np.random.default_rng(0), 1_000_000
    text = rng.integers(50_000, size=n).astype(np.int32)
    text[-1] = BREAK
    write_store(path, VOCABULARY, [], [Part(text, [File("/a", n, 0, n)])])
    assert DISK_BYTES * n <= path.stat().st_size <= 9 * n


def test_files_of_another_index_that_is_being_written_stay(tmp_path):
    """Its name may begin with this one's and a dot."""
    others = tmp_path / ".an.index.old.abcdefgh.part", tmp_path / ".another.abcdefgh.part", tmp_path / "x.part"
    for other in others:
        other.write_bytes(b"")
    left = tmp_path / ".an.index.abcd_fg1.part"
    left.write_bytes(b"")
    written(tmp_path / "an.index")
    assert all(other.exists() for other in others)
    assert not left.exists()


@pytest.mark.parametrize("seed", range(20))
def test_positions_are_sorted_by_what_stands_at_and_before_them(seed):
    rng = np.random.default_rng(seed)
    text = random_text(rng, int(rng.integers(1, 500)), int(rng.choice([1, 2, 5, 200, 60_000])))
    assert sort_positions(tokens(text)).tolist() == sorted(range(len(text)), key=lambda p: text[p::-1])


def test_positions_of_more_words_than_two_bytes_can_number_are_sorted_too():
    rng = np.random.default_rng(0)
    for n_words in (65_535, 65_536, 150_000):  # BREAK is one more
        words = rng.permutation(1 << 20)[:n_words]
        text = [*rng.permutation(words).tolist(), BREAK, *rng.choice(words, 20_000).tolist(), BREAK]
        text += text[-30:]
        expected = sorted(range(len(text)), key=lambda p: text[max(0, p - 50) : p + 1][::-1])
        assert sort_positions(tokens(text)).tolist() == expected
