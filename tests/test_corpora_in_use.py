"""Drafts from indexes, from the door to the text: sessions, the drop-in class, the command line."""

from __future__ import annotations

import json
from contextlib import closing

import numpy as np
import pytest
from benches import EXACT, EXACT_FLAGS, refused, run, write_lines

from racer_local import racing
from racer_local.config import DraftConfig
from racer_local.corpus.index import add, clear, create
from racer_local.corpus.store import File, Part, Store
from racer_local.cost import VerifyCost
from racer_local.errors import ConfigError, CorpusError
from racer_local.kernels.history import BREAK
from racer_local.llama import Model
from racer_local.llm import Llama
from racer_local.session import Session
from racer_local.stats import GenerationStats
from racer_local.text import VocabularyId

PROMPT = [1, *range(40, 60)]
N = 60
RACER = {"draft": "racer", "exact": True}


@pytest.fixture(autouse=True)
def cheap(monkeypatch):
    """What verifying costs is given, not measured: timing must not decide what is drafted."""
    monkeypatch.setattr(racing, "recall", lambda facts: VerifyCost.parse("1:1 2:1.05 64:2"))


def texts(*documents):
    files = [File(f"/notes/{number}", 1, 0, len(text) + 1) for number, text in enumerate(documents)]
    return Part(np.array([token for text in documents for token in [*text, BREAK]], np.int32), files)


@pytest.fixture(scope="module")
def said(tiny):
    """What the model says after PROMPT, by plain decoding."""
    with Session(tiny, EXACT, DraftConfig(draft="none")) as session:
        return session.answer(PROMPT, max_tokens=N).token_ids


@pytest.fixture
def known(tiny, tmp_path, said):
    """An index in which that stands, among other things."""
    noise = np.random.default_rng(0).integers(3, 300, 2000).tolist()
    create(tmp_path / "known.index", tiny.id, texts(noise, [*PROMPT[-8:], *said], noise[::-1]))
    return str(tmp_path / "known.index")


def answer(model, **draft):
    with Session(model, EXACT, DraftConfig(exact=True, **draft)) as session:
        return session.answer(PROMPT, max_tokens=N)


def test_what_stands_in_an_index_is_drafted_and_changes_no_token(tiny, known, said):
    without, drafted = answer(tiny), answer(tiny, corpora=(known,))
    assert without.token_ids == drafted.token_ids == said
    assert drafted.stats.accepted_by_source["corpus"] > N / 3
    assert drafted.stats.steps < without.stats.steps / 2
    assert without.stats.accepted_by_source["corpus"] == 0


def test_an_index_of_other_things_drafts_little_and_changes_no_token(tiny, tmp_path, said):
    noise = np.random.default_rng(1).integers(3, 300, 5000).tolist()
    create(tmp_path / "noise.index", tiny.id, texts(noise))
    assert answer(tiny, corpora=(str(tmp_path / "noise.index"),)).token_ids == said


def test_an_open_session_sees_what_is_added_at_its_next_answer_and_forgets_what_is_cleared(tiny, tmp_path, said):
    path = tmp_path / "live.index"
    create(path, tiny.id, texts(list(range(100, 200))))
    with Session(tiny, EXACT, DraftConfig(exact=True, corpora=(str(path),))) as session:

        def accepted():
            session._racer.drafter.clear()
            found = session.answer(PROMPT, max_tokens=N)
            assert found.token_ids == said
            return found.stats.accepted_by_source["corpus"]

        assert accepted() == 0
        add(path, tiny.id, texts([*PROMPT[-8:], *said]))
        assert accepted() > N / 3
        clear(path)
        assert accepted() == 0


def test_no_draft_runs_past_the_end_of_a_file(tiny, tmp_path, said):
    """Cut where each file ends, the same text gives drafts up to there and no further."""
    path = tmp_path / "cut.index"
    create(path, tiny.id, texts([*PROMPT[-8:], *said[:20]], said[20:40], said[40:]))
    whole, cut = tmp_path / "whole.index", answer(tiny, corpora=(str(path),))
    create(whole, tiny.id, texts([*PROMPT[-8:], *said]))
    assert cut.token_ids == said
    assert cut.stats.steps > answer(tiny, corpora=(str(whole),)).stats.steps


def test_answers_are_remembered_where_that_is_asked_for_and_drafted_from_later(tiny, tmp_path, said):
    path = tmp_path / "own.index"
    first = answer(tiny, remember=str(path))
    assert path.stat().st_mode & 0o077 == 0
    again = answer(tiny, remember=str(path))
    assert first.token_ids == again.token_ids == said
    assert again.stats.steps < first.stats.steps
    assert again.stats.accepted_by_source["corpus"] > 0
    store = Store(path, tiny.id)
    assert store.n_tokens == 2 * (N + 1)
    assert [token for token in store.segment(0).tokens.tolist() if token != BREAK] == said * 2


def test_an_answer_is_given_though_it_could_not_be_remembered(tiny, tmp_path, said):
    notices = []
    path = tmp_path / "own.index"
    with Session(tiny, EXACT, DraftConfig(exact=True, remember=str(path)), notify=notices.append) as session:
        path.write_text("rubbish")
        assert session.answer(PROMPT, max_tokens=N).token_ids == said
    assert path.read_text() == "rubbish"
    assert len([notice for notice in notices if "was not added" in notice]) == 1


# --- the drop-in class ---


@pytest.fixture
def llm(tiny_path):
    with closing(Llama(str(tiny_path), n_ctx=256, n_threads=1, verbose=False, racer=RACER)) as llm:
        yield llm


def from_corpus(llm, **asked):
    llm.forget()
    ids = llm.create_completion(PROMPT, max_tokens=N, temperature=0.0, logit_bias={2: -1e9}, **asked)["choices"]
    return ids, llm.last_stats["accepted_by_source"]["corpus"]


def test_corpora_hold_for_the_object_and_those_of_a_call_for_the_call(tiny_path, llm, known):
    text, none = from_corpus(llm)
    assert none == 0
    same, some = from_corpus(llm, corpora=[known])
    assert same == text
    assert some > 0
    assert from_corpus(llm)[1] == 0
    more = {"n_ctx": 256, "n_threads": 1, "verbose": False, "racer": RACER}
    with closing(Llama(str(tiny_path), corpora=[known], **more)) as own:
        assert from_corpus(own)[1] > 0
        assert from_corpus(own, corpora=[])[1] == 0
        assert from_corpus(own, racer={"max_nodes": 4})[1] > 0
        assert from_corpus(own, racer=False) == (text, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_an_index_that_is_wrong_is_refused_at_the_call_and_nothing_is_lost(llm, tmp_path, known, stream):
    other = tmp_path / "other.index"
    create(other, VocabularyId("other", 300, "/models/other.gguf"), texts([1, 2, 3]))
    for wrong, message in ((other, "another vocabulary.*other.gguf"), (tmp_path / "none", "No such file")):
        with pytest.raises(CorpusError, match=message):
            llm.create_completion(PROMPT, corpora=[known, str(wrong)], stream=stream)
    assert from_corpus(llm, corpora=[known])[1] > 0


def test_a_llama_that_drafts_nothing_takes_no_corpora(tiny_path, known):
    with pytest.raises(ConfigError, match="where nothing is drafted; leave out corpora"):
        Llama(str(tiny_path), n_ctx=64, embedding=True, verbose=False, corpora=[known])


def test_a_drafter_that_reads_no_index_says_so(llm, known):
    with pytest.raises(ConfigError, match="the paper drafter reads no indexes"):
        llm.create_completion(PROMPT, racer={"draft": "paper"}, corpora=[known])


# --- the command line ---


@pytest.fixture
def notes(tmp_path):
    folder = tmp_path / "notes"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("hello world, hello moon, hello <|im_end|> sun\n" * 20)
    (folder / "sub" / "b.txt").write_text("the quick brown fox\n" * 20)
    (folder / "image.bin").write_bytes(b"\x00\x01" * 500)
    (folder / "secret.log").write_text("ignored\n")
    (folder / ".gitignore").write_text("*.log\n")
    (folder / ".git").mkdir()
    return folder


@pytest.fixture
def built(capsys, tiny_path, notes, tmp_path):
    path = tmp_path / "my.index"
    code, out, err = run(capsys, "index", "build", notes, "-m", tiny_path, "-o", path)
    assert code == 0, err
    assert "indexed 3 files" in out
    assert "1 binary" in out
    assert "1 ignored by .gitignore" in out
    assert "on disk" in err
    return path


def info(capsys, path, *more):
    code, out, _ = run(capsys, "index", "info", path, "--json", *more)
    assert code == 0
    return json.loads(out)


def test_an_index_is_built_told_of_added_to_and_taken_from(capsys, built, notes, tiny_path):
    before = info(capsys, built, "--files", "--check")
    assert [file["name"].removeprefix(f"{notes}/") for file in before["files"]] == [".gitignore", "a.txt", "sub/b.txt"]
    assert before["bytes"] == built.stat().st_size
    (notes / "new.txt").write_text("fresh text\n" * 9)
    (notes / "a.txt").write_text("hello again\n" * 9)
    code, out, _ = run(capsys, "index", "add", built, notes)
    assert code == 0
    assert "added 2 files" in out
    assert "2 unchanged" in out
    after = info(capsys, built)
    assert after["files"] == 4
    assert run(capsys, "index", "remove", built, notes / "sub")[1].startswith("removed 1 files")
    assert info(capsys, built)["files"] == 3
    assert run(capsys, "index", "clear", built)[0] == 0
    assert info(capsys, built)["tokens"] == 0
    assert run(capsys, "index", "add", built, notes, "-m", tiny_path)[0] == 0
    assert info(capsys, built)["files"] == 4


def test_a_search_shows_what_a_draft_would_see_and_from_which_files(capsys, built, notes):
    code, out, _ = run(capsys, "index", "search", built, "the quick", "--explain", "--limit", "1")
    assert code == 0
    assert " brown fox" in out
    assert f"{notes}/sub/b.txt" in out
    found = json.loads(run(capsys, "index", "search", built, "the quick", "--json")[1])
    assert found[0]["text"].startswith(" brown")
    assert found[0]["files"] == [f"{notes}/sub/b.txt"]
    assert "drafts nothing" in run(capsys, "index", "search", built, "§")[1]


def test_each_message_of_a_chat_log_is_a_text_of_its_own(capsys, tiny_path, tmp_path):
    log = write_lines(
        tmp_path / "chat.jsonl",
        {"messages": [{"role": "user", "content": "ping"}, {"role": "assistant", "content": "pong"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "ding"}]},
    )
    assert run(capsys, "index", "build", log, "--chat", "-m", tiny_path, "-o", tmp_path / "i")[0] == 0
    assert "dr" in run(capsys, "index", "search", tmp_path / "i", "ping")[1]  # drafts nothing: no message goes on so
    assert run(capsys, "index", "search", tmp_path / "i", "pi", "--limit", "1")[1].endswith("'ng'\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "{notes}", "-m", "{model}", "-o", "{notes}"], "can't be written"),
        (["build", "{notes}/none", "-m", "{model}", "-o", "{tmp}/i"], "no such file or folder"),
        (["build", "{notes}", "-m", "{tmp}/no.gguf", "-o", "{tmp}/i"], "no such file"),
        (["build", "{notes}", "-m", "{model}", "-o", "{tmp}/i", "--max-tokens", "1"], "--max-tokens must be"),
        (["build", "{notes}", "-m", "{model}", "-o", "{tmp}/i", "--max-file-size", "2 GB"], "64M or 2G"),
        (["add", "{tmp}/none", "{notes}"], "can't be read"),
        (["remove", "{built}", "{tmp}/none"], "none of these is in it"),
        (["info", "{notes}/a.txt"], "is no index of racer-local"),
        (["search", "{built}", "x", "--limit", "0"], "--limit must be"),
        (["search", "{built}", "x", "-m", "{tmp}/no.gguf"], "no such file"),
        (["clear", "{tmp}/none"], "can't be read"),
    ],
)
def test_what_an_index_command_cannot_do_is_one_line(capsys, built, notes, tiny_path, tmp_path, arguments, message):
    places = {"notes": notes, "model": tiny_path, "tmp": tmp_path, "built": built}
    before = built.read_bytes()
    assert message in refused(capsys, "index", *(argument.format(**places) for argument in arguments))
    assert built.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_where_no_text_is_found_no_index_is_made_and_the_old_one_stays(capsys, built, notes, tiny_path):
    before = built.read_bytes()
    code, out, err = run(capsys, "index", "build", notes / "image.bin", "-m", tiny_path, "-o", built)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].endswith("no text was found; skipped 1 binary; name files or folders with text in them")
    assert built.read_bytes() == before


def test_max_tokens_is_a_cap_and_says_what_was_left_out(capsys, tiny_path, notes, tmp_path):
    code, out, _ = run(capsys, "index", "build", notes, "-m", tiny_path, "-o", tmp_path / "i", "--max-tokens", "100")
    assert code == 0
    assert "100 tokens" in out
    assert "beyond --max-tokens" in out


def test_generate_drafts_from_an_index_and_remembers(capsys, tiny_path, built, tmp_path):
    command = ["generate", "-m", tiny_path, "-p", "hello", "--raw", "--max-tokens", "20", "--json", *EXACT_FLAGS]
    plain = json.loads(run(capsys, *command, "--draft", "none")[1].splitlines()[-1])
    own = tmp_path / "own.index"
    for _ in range(2):
        code, out, err = run(capsys, *command, "--exact", "--corpus", built, "--remember", own)
        assert code == 0, err
        drafted = json.loads(out.splitlines()[-1])
        assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["stats"]["accepted_by_source"]["corpus"] > 0
    assert info(capsys, own)["files"] == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--corpus", "none.index"], "none.index can't be read"),
        (["--draft", "paper", "--corpus", "none.index"], "the paper drafter reads no indexes"),
        (["--remember", "no/such/folder"], "name a file in a folder that exists"),
        (["--compare", "--remember", "x"], "leave out --remember"),
        (["--corpus", ""], "must be the path of an index"),
    ],
)
def test_what_generate_cannot_draft_from_is_one_line(capsys, tiny_path, flags, message):
    assert message in refused(capsys, "generate", "-m", tiny_path, "-p", "x", "--raw", *EXACT_FLAGS, *flags)


def test_an_index_serves_every_model_of_its_vocabulary(tiny_path, tiny, known, tmp_path):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny_path.read_bytes())
    with Model(copy) as model:
        assert model.fingerprint == tiny.fingerprint
        assert answer(model, corpora=(known,)).stats.accepted_by_source["corpus"] > 0


@pytest.mark.parametrize("draft", ["paper", "lookup", "logits", "retrieval", "none"])
def test_another_drafter_can_be_asked_for_where_indexes_were_opened(tiny, known, said, draft):
    with Session(tiny, EXACT, DraftConfig(exact=True, corpora=(known,))) as session:
        stats = GenerationStats()
        asked = session.for_answer({"draft": draft})
        ids = [t.id for p in session.stream(PROMPT, max_tokens=N, draft=asked, stats=stats) for t in p.tokens]
        assert (ids, stats.draft, asked.corpora) == (said, draft, ())
        assert session.answer(PROMPT, max_tokens=N).stats.accepted_by_source["corpus"] > N / 3
        if draft != "none":
            with pytest.raises(ConfigError, match=f"the {draft} drafter reads no indexes"):
                session.for_answer({"draft": draft, "corpora": [known]})
