"""The suite's questions, fetched from a server on this machine."""

from __future__ import annotations

import gzip
import json

import local_server
import pytest
from benches import run
from local_server import Page

from racer_local.bench import sources
from racer_local.bench.data import FILES, in_turns, read_folder

server, home = local_server.server, local_server.home

SPEC = b"".join(
    json.dumps({"question_id": i, "category": "qa", "turns": [f"q\u2028{i}"]}, ensure_ascii=False).encode() + b"\n"
    for i in range(3)
)
TASK = {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "", "test": "t", "entry_point": "f"}
CODE = gzip.compress(json.dumps(TASK).encode() + b"\n")
MATHS = '一加一？\t2\n他说"好"，二加二？\t4\n'.encode()
BODIES = dict(zip(FILES, (SPEC, CODE, MATHS), strict=True))


@pytest.fixture
def served(server, monkeypatch):
    """The sources' files, small, on this machine."""
    counts = dict(zip(FILES, (3, 1, 2), strict=True))
    for name, body in BODIES.items():
        server.pages[f"/{name}"] = Page(body)
        url = f"http://127.0.0.1:{server.server_port}/{name}"
        monkeypatch.setitem(sources.SOURCES, name, sources.SOURCES[name]._replace(url=url, questions=counts[name]))
    return server


def failed(capsys, *args):
    """The last line of a command to which the world was not kind."""
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    return err.splitlines()[-1]


def test_all_benchmarks_are_fetched_once_and_can_be_asked(served, tmp_path, capsys):
    folder = tmp_path / "data"
    code, out, _ = run(capsys, "bench", "data", folder)
    assert code == 0
    assert json.loads(out.splitlines()[-1]) == dict(zip(FILES, (3, 1, 2), strict=True))
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    questions = in_turns(read_folder(folder))
    assert [(q.category, q.id) for q in questions[:3]] == [("spec_bench", "0"), ("human_eval", "0"), ("mgsm_zh", "1")]
    assert questions[1].turns == ["Implement the following code.\ndef f():\n"]
    assert questions[1].check.test == "t"
    assert [q.turns[0] for q in questions if q.category == "mgsm_zh"] == ["一加一？", '他说"好"，二加二？']
    asked = len(served.seen)
    assert run(capsys, "bench", "data", folder)[0] == 0
    assert len(served.seen) == asked


def test_a_broken_download_goes_on(served, tmp_path):
    served.pages["/mgsm_zh.jsonl"] = Page(MATHS, cuts=[7])
    assert sources.fetch("mgsm_zh.jsonl", tmp_path) == 2
    assert [headers["Range"] for _, headers in served.seen] == [None, "bytes=7-"]


@pytest.mark.parametrize("body", [SPEC + SPEC, b"<html>moved</html>\n", b"{}\n", b""])
def test_what_is_not_the_benchmark_is_refused_and_thrown_away(served, tmp_path, capsys, body):
    served.pages["/spec_bench.jsonl"] = Page(body)
    said = failed(capsys, "bench", "data", tmp_path / "data")
    assert "is not the spec_bench.jsonl it was" in said
    assert str(tmp_path / "data" / "spec_bench.jsonl") in said
    assert not list((tmp_path / "data").iterdir())


def test_a_source_that_is_gone_says_what_else_can_be_done(served, tmp_path, capsys):
    del served.pages["/human_eval.jsonl"]
    said = failed(capsys, "bench", "data", tmp_path)
    assert "HTTP 404" in said
    assert f"or put the file at {tmp_path / 'human_eval.jsonl'}" in said
