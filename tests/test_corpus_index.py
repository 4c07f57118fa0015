"""Building, adding to and clearing indexes, against a dict of files; writers that are killed, readers that stay."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from itertools import pairwise

import numpy as np
import pytest
from indexes import content, index_of, part, random_texts, store_of
from memories import VOCABULARY, context_after, tokens

from racer_local.config import cache_home
from racer_local.corpus import index as module
from racer_local.corpus import shelf
from racer_local.corpus.corpora import Corpora
from racer_local.corpus.index import add, clear, create, remember, remove
from racer_local.corpus.search import search
from racer_local.corpus.store import Store, write_store
from racer_local.errors import ConfigError, CorpusError
from racer_local.kernels import suffixes
from racer_local.kernels.history import BREAK
from racer_local.kernels.suffixes import LONGEST, MOST_SEGMENTS

others = multiprocessing.get_context("forkserver")  # the sorter's threads do not survive a fork of this process
others.set_forkserver_preload(["pytest", "racer_local.corpus.search", "racer_local.kernels.growth"])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "an.index"


def followers(index, context, least=1):
    found = suffixes.new_found()
    suffixes.wake(index)
    n = suffixes.find(index, context_after(context), least, 0, found)
    return sorted(found.tokens[:n].tolist())


def reads_as_sorted(segment):
    """Whether an order is that of the text as far as no BREAK is crossed: all that a search sees of it."""
    text = segment.tokens.tolist()

    def key(position):
        before = text[max(0, position - LONGEST) : position + 1][::-1]
        return before[: before.index(BREAK)] if BREAK in before else before

    keys = [key(position) for position in segment.order.tolist()]
    return sorted(segment.order.tolist()) == [*range(len(text))] and keys == sorted(keys)


@pytest.mark.parametrize("seed", range(12))
def test_an_index_holds_what_a_dict_of_its_files_holds_whatever_was_done_to_it(path, monkeypatch, seed):
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(module, "SMALL_SEGMENT", int(rng.choice([10, 200])))
    names = [f"/{folder}/{file}" for folder in ("a", "ab", "a/b") for file in "xyz"]
    held = random_texts(rng, rng.choice(names, 3, replace=False).tolist())
    create(path, VOCABULARY, part(held))
    for _ in range(25):
        what = rng.random()
        some = rng.choice(names, int(rng.integers(1, 4)), replace=False).tolist()
        if what < 0.6:
            new = random_texts(rng, some, int(rng.choice([10, 100, 300])))
            add(path, VOCABULARY, part(new))
            held |= new
        elif what < 0.9:
            some = [os.path.dirname(name) if rng.random() < 0.3 else name for name in some]
            gone = {name for name in held if any(name == one or name.startswith(one + "/") for one in some)}
            assert {file.name for file in remove(path, some)} == gone
            held = {name: text for name, text in held.items() if name not in gone}
        elif what < 0.95:
            assert clear(path) == sum(len(text) + 1 for text in held.values())
            held = {}
        else:
            held = random_texts(rng, some)
            create(path, VOCABULARY, part(held))
        store = Store(path, VOCABULARY)
        store.check()
        assert content(store) == held
        assert {file.name: file.tokens for file in store.all_files} == {n: len(t) + 1 for n, t in held.items()}
        assert store.n_tokens == sum(file.tokens for file in store.all_files)
        assert all(map(reads_as_sorted, store.segments))
        for text in held.values():
            if len(text) > 20 and BREAK not in text[-20:]:
                assert text[-1] in followers(index_of(store), text[:-1])


def test_a_file_that_is_added_again_replaces_the_old_one(path):
    create(path, VOCABULARY, part({"/a": [1, 2, 3], "/b": [1, 2, 4]}))
    add(path, VOCABULARY, part({"/a": [1, 2, 5]}))
    assert content(Store(path)) == {"/b": [1, 2, 4], "/a": [1, 2, 5]}
    assert followers(index_of(Store(path)), [1, 2]) == [4, 5]


def test_a_folder_that_is_removed_takes_what_is_in_it_and_not_what_is_called_alike(path):
    names = ["/a/b", "/a/bc", "/a/bc/x", "/a/b/x", "/a/b/c/y", "/a/b.x", "/a"]
    create(path, VOCABULARY, part({name: [i] for i, name in enumerate(names)}))
    assert [file.name for file in remove(path, ["/a/b"])] == ["/a/b", "/a/b/x", "/a/b/c/y"]
    assert [*content(Store(path))] == ["/a/bc", "/a/bc/x", "/a/b.x", "/a"]
    assert [file.name for file in remove(path, ["/a/bc/"])] == ["/a/bc/x"]
    before = path.read_bytes()
    assert remove(path, ["/none"]) == []
    assert path.read_bytes() == before


@pytest.mark.parametrize("small", [0, 1 << 18])
@pytest.mark.parametrize("how", ["remove", "clear", "replace"])
def test_text_that_was_removed_is_nowhere_in_the_file(path, monkeypatch, how, small):
    """Nor are its files' names."""
    monkeypatch.setattr(module, "SMALL_SEGMENT", small)
    secret = [123_456, 654_321, 135_790]
    create(path, VOCABULARY, part({"/kept": [1, 2, 3] * 50, "/secret": [1, 2, *secret, 3]}))
    add(path, VOCABULARY, part({"/more": [5, 6]}))
    assert all(tokens([token]).tobytes() in path.read_bytes() for token in secret)
    if how == "remove":
        remove(path, ["/secret"])
    elif how == "clear":
        clear(path)
    else:
        add(path, VOCABULARY, part({"/secret": [7]}))
    raw = path.read_bytes()
    assert not any(tokens([token]).tobytes() in raw for token in secret)
    assert how == "replace" or b"secret" not in raw


def test_segments_stay_few_over_many_additions(path, monkeypatch):
    """Each is at least twice as large as the next, or larger than what is sorted without a thought."""
    monkeypatch.setattr(module, "SMALL_SEGMENT", 64)
    rng = np.random.default_rng(0)
    create(path, VOCABULARY, part({}))
    for number in range(200):
        add(path, VOCABULARY, part(random_texts(rng, [f"/{number}"], int(rng.choice([5, 50, 500])))))
        store = Store(path)
        sizes = [store.length(i) for i in range(store.n_segments)]
        assert len(sizes) <= MOST_SEGMENTS
        assert sum(size <= 64 for size in sizes) <= 1
        for larger, smaller in pairwise(sizes):
            assert larger >= 2 * smaller or larger > 64
    assert len(content(Store(path))) == 200
    assert len(sizes) > 2


def test_segments_that_are_too_many_are_joined_and_none_grows_too_large_to_be_sorted(path, monkeypatch):
    monkeypatch.setattr(module, "SMALL_SEGMENT", 4)
    monkeypatch.setattr(module, "MOST_SEGMENTS", 3)
    write_store(path, VOCABULARY, [], [part({f"/{n}": [1] * n}) for n in (10_000, 1000, 100)])
    add(path, VOCABULARY, part({"/new": [7]}))
    store = Store(path)
    assert [[file.name for file in store.files(number)] for number in range(3)] == [
        ["/10000"],
        ["/1000"],
        ["/new", "/100"],
    ]
    monkeypatch.setattr(module, "MOST_TOKENS", 150)
    create(path, VOCABULARY, part({"/a": [1] * 99}))
    add(path, VOCABULARY, part({"/b": [2] * 99}))
    assert sorted(content(Store(path))) == ["/a", "/b"]
    assert Store(path).n_segments == 2


def test_an_index_of_another_vocabulary_is_not_added_to(path):
    create(path, VOCABULARY, part({"/a": [1]}))
    with pytest.raises(CorpusError, match="another vocabulary"):
        add(path, VOCABULARY._replace(fingerprint="other"), part({"/b": [1]}))
    with pytest.raises(CorpusError, match="can't be read"):
        add(path.parent / "none", VOCABULARY, part({"/b": [1]}))
    assert content(Store(path)) == {"/a": [1]}


def test_an_index_behind_a_link_is_written_where_it_lies(tmp_path, path):
    """Else what was removed would stay there."""
    link = tmp_path / "link"
    link.symlink_to(path)
    create(link, VOCABULARY, part({"/a": [1], "/b": [2]}))
    remove(link, ["/a"])
    assert link.is_symlink()
    assert content(Store(path)) == content(Store(link)) == {"/b": [2]}


# Remembering answers


def test_answers_are_cut_at_end_tokens_and_empty_ones_add_nothing(path):
    remember(path, VOCABULARY, [[], []], {9})
    assert not path.exists()
    remember(path, VOCABULARY, [[1, 2, 9], [], [3, 9, 4]], {9, 8})
    assert [*content(Store(path)).values()] == [[1, 2, BREAK], [3, BREAK, 4]]
    before = path.read_bytes()
    remember(path, VOCABULARY, [[]], {9})
    assert path.read_bytes() == before
    remember(path, VOCABULARY, [[1, 2, 9]], ())
    assert sorted(content(Store(path)).values(), reverse=True) == [[3, BREAK, 4], [1, 2, 9], [1, 2, BREAK]]
    assert all(name.startswith("answer ") for name in content(Store(path)))


# Readers


def in_child(work, *arguments):
    child = others.Process(target=work, args=arguments)
    child.start()
    child.join()
    assert child.exitcode == 0


def test_what_another_process_adds_is_seen_at_the_next_refresh(path):
    create(path, VOCABULARY, part({"/a": [1, 2, 3]}))
    corpora = Corpora([path], VOCABULARY)
    in_child(add, path, VOCABULARY, part({"/b": [1, 2, 4]}))
    old = corpora.index
    assert followers(old, [1, 2]) == [3]
    assert corpora.refresh()
    assert followers(corpora.index, [1, 2]) == [3, 4]
    assert not corpora.refresh()


def test_rubbish_in_the_place_of_an_index_is_one_notice_and_what_is_open_stays(path):
    create(path, VOCABULARY, part({"/a": [1, 2, 3]}))
    notices = []
    corpora = Corpora([path], VOCABULARY, notices.append)
    for number in (1, 2):
        (path.parent / "rubbish").write_bytes(b"x" * 100 * number)
        (path.parent / "rubbish").rename(path)
        assert [corpora.refresh() for _ in range(3)] == [False] * 3
        assert len(notices) == number
        assert notices[-1].endswith("what was open is used on")
        assert followers(corpora.index, [1, 2]) == [3]
    create(path, VOCABULARY, part({"/a": [1, 2, 5]}))
    assert corpora.refresh()
    assert followers(corpora.index, [1, 2]) == [5]
    assert len(notices) == 2


def test_an_index_that_is_deleted_is_used_no_more_until_it_is_there_again(path):
    create(path, VOCABULARY, part({"/a": [1, 2, 3]}))
    corpora = Corpora([path], VOCABULARY)
    path.unlink()
    assert corpora.refresh()
    assert followers(corpora.index, [1, 2]) == []
    assert not corpora.refresh()
    create(path, VOCABULARY, part({"/a": [1, 2, 4]}))
    assert corpora.refresh()
    assert followers(corpora.index, [1, 2]) == [4]


def test_an_index_of_own_answers_may_come_later_and_a_named_one_must_be_there(path):
    corpora = Corpora([], VOCABULARY, own=path)
    assert not corpora.refresh()
    remember(path, VOCABULARY, [[1, 2, 3]], ())
    assert corpora.refresh()
    assert followers(corpora.index, [1, 2]) == [3]
    with pytest.raises(CorpusError, match="can't be read"):
        Corpora([path.parent / "none"], VOCABULARY)


def test_several_indexes_are_searched_together_and_one_that_is_named_twice_once(tmp_path):
    for name, token in (("a", 3), ("b", 4)):
        create(tmp_path / name, VOCABULARY, part({"/x": [1, 2, token]}))
    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "a"]
    assert followers(Corpora(paths, VOCABULARY, own=tmp_path / "b").index, [1, 2]) == [3, 4]


def test_a_shelf_keeps_sets_of_indexes_open_up_to_a_number(tmp_path):
    paths = [str(tmp_path / str(i)) for i in range(shelf.KEPT + 2)]
    for path in paths:
        create(module.Path(path), VOCABULARY, part({"/x": [1]}))
    kept, notices = shelf.Shelf(lambda: VOCABULARY, {9}, [].append), []
    assert kept.corpora((), None) is None
    first = [kept.corpora((path,), None) for path in paths[: shelf.KEPT]]
    assert [kept.corpora((path,), None) for path in paths[: shelf.KEPT]] == first
    kept.corpora((paths[-1],), None)
    assert kept.corpora((paths[-2],), None) is not first[0]
    assert kept.corpora((paths[2],), None) is first[2]
    with pytest.raises(ConfigError, match="can't be written; name a file in a folder that exists"):
        kept.corpora((), str(tmp_path / "none" / "own"))
    shelf.Shelf(lambda: VOCABULARY, {9}, notices.append).remember(str(tmp_path / "none" / "own"), [[1]])
    assert len(notices) == 1


def test_search_tells_what_followed_how_often_and_where(path):
    store = store_of(path, {"/a": [1, 5, 6, 8, 9], "/b": [5, 6, 7], "/c": [2, 5, 6, 8, 9]})
    assert [tuple(one) for one in search(store, tokens([5, 6]))] == [
        ([8, 9], 2, 2, ["/a", "/c"]),
        ([7], 2, 1, ["/b"]),
    ]
    assert search(store, tokens([])) == []


# Writers


def add_ten(path, number, how):
    for i in range(10):
        if how == "remember":
            remember(path, VOCABULARY, [[number, i]], ())
        else:
            add(path, VOCABULARY, part({f"/{number}/{i}": [number, i]}))


@pytest.mark.parametrize("how", ["add", "remember"])
def test_two_processes_that_add_at_once_lose_nothing(path, how):
    """Even if both begin the index."""
    if how == "add":
        create(path, VOCABULARY, part({}))
    children = [others.Process(target=add_ten, args=(path, number, how)) for number in (1, 2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert sorted(content(Store(path)).values()) == [[number, i] for number in (1, 2) for i in range(10)]


def test_locks_lie_in_the_users_folder_and_one_that_is_held_is_waited_for(path, monkeypatch):
    create(path, VOCABULARY, part({}))
    assert {file.suffix for file in (cache_home() / "locks").iterdir()} == {".lock"}
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    with module.writing(path), pytest.raises(CorpusError, match=r"another process has been writing .* try again later"):
        clear(path)
    clear(path)


def big_part(name, n, seed):
    return part({name: np.random.default_rng(seed).integers(100, size=n).tolist()})


def kill_writers(path, parts, pipe):
    """Start one for each number of seconds that comes, and kill it after them; tells how long it lived."""
    suffixes.write_directory(
        parts[0].tokens, np.arange(len(parts[0].tokens), dtype=np.int32), np.zeros(20_000, np.int32)
    )
    for seconds in iter(pipe.recv, None):
        started, child = time.perf_counter(), os.fork()
        if not child:
            create(path, VOCABULARY, parts[0])
            for new in parts[1:]:
                add(path, VOCABULARY, new)
            os._exit(0)
        if seconds:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pipe.send(time.perf_counter() - started)


def test_a_writer_that_is_killed_at_any_moment_leaves_the_old_state_or_the_new_one(path):
    """Sorting and all. What it left half-written is gone with the next addition."""
    parts = [big_part(f"/{i}", n, i) for i, n in enumerate((150_000, 5_000, 60_000, 200_000))]
    texts = {f"/{i}": one.tokens[:-1].tolist() for i, one in enumerate(parts)}
    here, there = others.Pipe()
    killer, rng = others.Process(target=kill_writers, args=(path, parts, there), daemon=True), np.random.default_rng(0)
    killer.start()
    there.close()
    here.send(0)
    whole, states, left = here.recv(), set(), 0
    assert content(Store(path)) == texts
    for share in rng.permutation(50) / 50:
        path.unlink()
        here.send((share + 0.01) * whole)
        here.recv()
        left += any(name.endswith(".part") for name in os.listdir(path.parent))
        state = 0
        if path.exists():
            store = Store(path, VOCABULARY)
            store.check()
            held = content(store)
            state = len(held)
            assert held == {name: texts[name] for name in [*texts][:state]}
            add(path, VOCABULARY, part({"/last": [1, 2]}))
        else:
            create(path, VOCABULARY, part({"/last": [1, 2]}))
        states.add(state)
        assert content(Store(path))["/last"] == [1, 2]
        assert os.listdir(path.parent) == [path.name]
    here.send(None)
    killer.join()
    assert len(states) > 2
    assert left > 0
