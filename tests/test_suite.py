"""The suite: who is asked what and when, what is kept, and that it goes on where it stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from time import sleep

import pytest
from benches import EXACT, EXACT_FLAGS, refused, run, write_lines
from memories import part_of

from racer_local.bench import peers, results, suite
from racer_local.bench.data import Question, in_turns, read_folder
from racer_local.bench.ways import parse_draft
from racer_local.config import DraftConfig, ModelConfig, SamplingConfig
from racer_local.corpus.index import create
from racer_local.errors import ConfigError, ModelError
from racer_local.session import Session
from racer_local.tuning.budget import Budget

GREEDY = SamplingConfig()


@pytest.fixture
def folder(tmp_path):
    """Two questions of each of three categories, one of two turns."""
    data = tmp_path / "data"
    data.mkdir()
    qa = [{"question_id": i, "category": "qa", "turns": [f"what is {i}"]} for i in range(2)]
    rag = [{"question_id": 10 + i, "category": "rag", "turns": [f"read {i}", "again"]} for i in range(2)]
    write_lines(data / "spec_bench.jsonl", *qa, *rag)
    tested = {"prompt": "def one():\n", "test": "def check(f):\n    assert f() == 1", "entry_point": "one"}
    lines = [{"question_id": i, "category": "coding", "turns": [f"write {i}"], **tested} for i in range(2)]
    write_lines(data / "human_eval.jsonl", *lines)
    return data


@pytest.fixture
def fake_server(tmp_path):
    """A program that is asked as llama-server is; it answers with sevens, and notes how it was called."""
    script = tmp_path / "llama-server"
    script.write_text(
        f"#!{sys.executable}\n"
        + r"""
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
if "--help" in sys.argv:
    print("--spec-type none,draft-simple,ngram-simple,ngram-mod  types of drafts")
    sys.exit()
log = open(__file__ + ".log", "a")
print(json.dumps(sys.argv[1:]), file=log, flush=True)
if "broken" in sys.argv[sys.argv.index("--spec-type") + 1]:
    sys.exit("error: no such model")

class Handler(BaseHTTPRequestHandler):
    def say(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.say(200, {"status": "ok"})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print(json.dumps(asked), file=log, flush=True)
        if len(asked["prompt"]) > 200:
            return self.say(400, {"error": "too long"})
        n = asked["n_predict"]
        timings = {"predicted_n": n, "predicted_ms": 2.0 * n, "draft_n": 2 * n, "draft_n_accepted": n // 2}
        self.say(200, {"tokens": [7] * n, "timings": timings})

    def log_message(self, *args):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
""",
        encoding="utf-8",
    )
    script.chmod(0o755)
    return script


def logged(program):
    """(command lines, requests) of a fake server."""
    lines = [json.loads(line) for line in Path(f"{program}.log").read_text().splitlines()]
    return [line for line in lines if isinstance(line, list)], [line for line in lines if isinstance(line, dict)]


def measured(model, plan, questions, keep=None, done=None, budget=None):
    """The records of a run."""
    records = []
    with suite.opened(plan, model, ModelConfig(), EXACT) as ways:
        suite.run(plan, model, ways, questions, done or set(), budget, keep or records.append)
    return records


PLAN = suite.Plan(drafts=("none", "lookup", "racer"), temperatures=(0.0,), max_tokens=6, peers=False)


def test_questions_of_a_folder_come_a_category_after_the_other(folder):
    questions = in_turns(read_folder(folder))
    assert [question.category for question in questions] == ["qa", "rag", "human_eval"] * 2
    assert [question.id for question in questions] == ["0", "10", "0", "1", "11", "1"]
    assert questions[2].check.entry_point == "one"
    assert len(read_folder(folder, 1)) == 3


def test_every_way_is_asked_every_question_and_each_goes_first_in_turn(tiny, folder):
    questions = in_turns(read_folder(folder))
    records = measured(tiny, PLAN, questions)
    assert [record.key for record in records] == [(0.0, 0, q.category, q.id) for q in questions]
    assert [len(record.turns) for record in records] == [len(q.turns) for q in questions]
    for record in records:
        for turn in record.turns:
            assert set(turn) == {"none", "lookup", "racer"}
            for counts in turn.values():
                assert counts.tokens == turn["none"].tokens
                assert counts.differs is None
                assert sum(counts.nodes.values()) == sum(counts.lengths.values()) == counts.steps
                assert sum(int(n) * k for n, k in counts.lengths.items()) == counts.accepted
                assert sum((int(n) - 1) * k for n, k in counts.nodes.items()) == counts.drafted
                assert 0 < counts.verify_seconds < counts.timed_seconds < counts.seconds
    firsts = [next(iter(record.turns[0])) for record in records]
    assert Counter(firsts) == {"none": 2, "lookup": 2, "racer": 2}
    assert [record.turns[0]["none"].passed for record in records] == [None, None, False] * 2


def test_each_pass_begins_with_ways_that_have_learned_nothing(tiny, folder, monkeypatch):
    forgotten = []
    monkeypatch.setattr(Session, "forget", lambda self: forgotten.append(self.draft.draft))
    plan = suite.Plan(drafts=("lookup",), temperatures=(0.0, 0.8), repeats=2, max_tokens=2, peers=False)
    records = measured(tiny, plan, read_folder(folder, 1))
    passes = [(0.0, 0), (0.8, 0), (0.0, 1), (0.8, 1)]
    assert [(r.temperature, r.repeat) for r in records] == [one for one in passes for _ in range(3)]
    assert forgotten == ["none", "lookup"] * 4


def test_who_is_to_be_asked_rarely_is_asked_in_every_category_at_one_question_of_four(tiny):
    questions = [Question(category, [f"{category} {i}"], str(i)) for i in range(4) for category in "abcd"]
    plan = suite.Plan(drafts=("none", "lookup"), temperatures=(0.0,), max_tokens=1, peers=False, rarely=("lookup",))
    records = measured(tiny, plan, questions)
    asked = [record.category for record in records if "lookup" in record.turns[0]]
    assert Counter(asked) == {"a": 1, "b": 1, "c": 1, "d": 1}
    assert all("none" in record.turns[0] for record in records)


def test_what_does_not_fit_into_the_context_is_kept_as_such_and_ends_nothing(tiny):
    records = measured(tiny, PLAN, [Question("a", ["x" * 400], "0"), Question("a", ["short"], "1")])
    assert [len(record.turns) for record in records] == [0, 1]


def test_the_budget_is_shared_out_among_the_passes_and_a_later_run_does_the_rest(tiny, folder):
    now = [0.0]
    questions = in_turns(read_folder(folder))
    plan = suite.Plan(drafts=("none",), temperatures=(0.0, 0.8), max_tokens=1, peers=False)
    records = []

    def keep(record):
        records.append(record)
        now[0] += 10

    measured(tiny, plan, questions, keep, budget=Budget(60, lambda: now[0]))
    assert [r.temperature for r in records] == [0.0] * 3 + [0.8] * 3
    measured(tiny, plan, questions, keep, done={record.key for record in records})
    assert len({record.key for record in records}) == len(records) == 12


@pytest.fixture
def liar(monkeypatch):
    """Lookup gets every second turn wrong; the prompts that were answered."""
    answer, prompts = Session.answer, []

    def lying(self, prompt, **options):
        given = answer(self, prompt, **options)
        prompts.append(list(prompt))
        if self.draft.draft == "lookup":
            given.token_ids[-1] += 1
        return given

    monkeypatch.setattr(Session, "answer", lying)
    return prompts


def test_later_turns_go_on_from_plain_decodings_answer_and_other_answers_are_counted(tiny, liar):
    plan = suite.Plan(drafts=("lookup",), temperatures=(0.0,), max_tokens=4, peers=False)
    records = measured(tiny, plan, [Question("a", ["hello", "again"], "0")])
    asked = liar[2:]
    assert asked[0] == asked[1] != asked[2] == asked[3]
    assert [turn["lookup"].differs for turn in records[0].turns] == [3, 3]
    assert [turn["none"].differs for turn in records[0].turns] == [None, None]


def test_exact_ways_are_compared_with_exact_plain_decoding(tiny):
    plan = suite.Plan(drafts=("racer", "racer+exact"), temperatures=(0.0,), max_tokens=4, peers=False)
    assert plan.names == ["none", "none+exact", "racer", "racer+exact"]
    assert plan.draft("racer+exact").exact
    assert not plan.draft("racer").exact
    (record,) = measured(tiny, plan, [Question("a", ["hello"], "0")])
    assert all(record.turns[0][name].differs is None for name in plan.names)
    assert suite.Plan(exact=True).draft("racer").exact


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("paper@16", DraftConfig(draft="paper", max_nodes=16)),
        (" racer ", DraftConfig(draft="racer")),
        ("racer+corpus", DraftConfig(corpora=("a", "b"))),
        ("racer", DraftConfig()),
        ("racer@4+corpus+exact", DraftConfig(max_nodes=4, corpora=("a", "b"), exact=True)),
    ],
)
def test_a_drafter_may_name_its_nodes_read_indexes_and_be_exact(name, draft):
    assert parse_draft(name, ["a", "b"]) == draft


def suite_command(folder, output, *more):
    return ["bench", "suite", "--data-dir", folder, "-o", output, "--max-tokens", 4, *EXACT_FLAGS, *more]


def test_an_interrupted_suite_goes_on_and_ends_as_an_unbroken_one(tiny_path, folder, tmp_path, capsys, monkeypatch):
    output, asked = tmp_path / "out.jsonl", []
    command = suite_command(folder, output, "-m", tiny_path, "--draft", "racer", "--no-peers", "--temperature", 0)
    add = suite.Journal.add

    def interrupted(journal, record):
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(record.key)
        add(journal, record)

    with monkeypatch.context() as patch:
        patch.setattr(suite.Journal, "add", interrupted)
        code, out, _ = run(capsys, *command)
    assert code == 130
    assert len(results.read(output).records) == 3
    assert json.loads(out.splitlines()[-1])["temperatures"]["0"]["total"]["racer"]["answers"] == 4
    output.write_bytes(output.read_bytes() + b'{"temperature": 0.0, "rep')  # what a kill leaves
    code, out, _ = run(capsys, *command)
    assert code == 0
    found = results.read(output)
    assert [r.key for r in found.records] == [(0.0, 0, q.category, q.id) for q in in_turns(read_folder(folder))]
    assert len(output.read_text().splitlines()) == 7
    assert "total" in out
    assert "racer" in out


def test_a_file_of_another_plan_is_not_gone_on_with(tiny_path, folder, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    command = suite_command(folder, output, "-m", tiny_path, "--draft", "none", "--no-peers", "--temperature", 0)
    assert run(capsys, *command)[0] == 0
    before = output.read_bytes()
    said = refused(capsys, *command, "--exact")
    assert "was begun with another settings" in said
    assert "--overwrite" in said
    assert output.read_bytes() == before
    write_lines(output, {"text": "mine"})
    assert "is no file of: racer-local bench suite" in refused(capsys, *command)
    assert json.loads(output.read_text()) == {"text": "mine"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--limit", "0"], "must be at least 1"),
        (["--repeats", "0"], "must be at least 1"),
        (["--time-budget", "0"], "--time-budget is 0"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--context-tokens", "0"], "must be at least 1"),
        (["--data", "missing.jsonl"], "either --data-dir DIR (racer-local bench data gets them) or --data FILE"),
        (["--draft", "paper@"], "'paper@' must be a drafter, or a drafter and its nodes like paper@16"),
        (["--draft", "paper@x"], "'paper@x' must be a drafter"),
        (["--draft", "paper@\u00b2"], "must be a drafter, or a drafter and its nodes"),
        (["--draft", "paper@0"], "max_nodes is 0; it must be from 1 to 255"),
        (["--draft", "paper@256"], "max_nodes is 256; it must be from 1 to 255"),
        (["--draft", "eagle"], "draft is 'eagle'; it must be one of none, lookup"),
        (["--draft", "@16"], "draft is ''"),
        (["--draft", "racer+corpus"], "'racer+corpus' needs an index; name it with --corpus"),
        (["--draft", "racer+corpora"], "'racer+corpora' ends in +corpora; what can be is +corpus and +exact"),
        (["--corpus", "none.index"], "none.index can't be read"),
        (["--rarely", "paper@9,none"], "--rarely names none, paper@9; what can be is lookup, logits"),
        (["--llama-server", "/nowhere/llama-server"], "can't be run"),
        (["--llama-server", sys.executable], "knows no --spec-type"),
        (["--data-dir", "/nowhere"], "racer-local bench data /nowhere"),
        (["-o", "/nowhere/out.jsonl"], "can't be written"),
    ],
)
def test_a_bad_suite_is_refused_in_a_line(tiny_path, folder, tmp_path, capsys, more, message):
    command = suite_command(folder, tmp_path / "out.jsonl", "-m", tiny_path, *more)
    assert message in refused(capsys, *command)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.skipif(not hasattr(signal, "SIGTSTP"), reason="no job control here")
def test_ctrl_z_stops_behind_the_question_and_costs_neither_time_nor_budget(tiny, folder, monkeypatch):
    now, stopped, records = [0.0], [], []
    budget = Budget(100, lambda: now[0])

    def kill(pid, number):
        stopped.append((pid, number, len(records)))
        now[0] += 1000

    answer = Session.answer

    def pressed(self, prompt, **options):
        if len(records) == 1 and not stopped:
            signal.raise_signal(signal.SIGTSTP)
        return answer(self, prompt, **options)

    monkeypatch.setattr(Session, "answer", pressed)
    monkeypatch.setattr(os, "kill", kill)
    measured(tiny, PLAN, read_folder(folder, 1), records.append, budget=budget)
    assert stopped == [(os.getpid(), signal.SIGSTOP, 2)], "after the second record, once"
    assert len(records) == 3
    assert budget.left > 0
    assert signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL


def test_a_suite_runs_outside_of_the_main_thread_too(tiny, folder):
    found = []
    thread = threading.Thread(target=lambda: found.append(measured(tiny, PLAN, read_folder(folder, 1))))
    thread.start()
    thread.join()
    assert len(found[0]) == 3


def test_the_bindings_own_llama_answers_as_plain_decoding_does(tiny):
    prompt = tiny.tokenize("one two one two", add_special=True)
    with Session(tiny, EXACT, parse_draft("none")) as session:
        plain = session.answer(prompt, max_tokens=12)
    for lookup in (False, True):
        peer = peers.BindingPeer(tiny, ModelConfig(), EXACT, 256, lookup=lookup)
        for _ in range(2):
            answer = peer.answer(prompt, sampling=GREEDY, max_tokens=12)
            assert answer.token_ids == plain.token_ids
            assert answer.stats.emitted == len(answer.token_ids)
            assert answer.stats.prefill_seconds > 0
            assert answer.stats.decode_seconds > 0
            peer.forget()
        seeded = [peer.answer(prompt, sampling=SamplingConfig(temperature=1, seed=s), max_tokens=12) for s in (1, 1, 2)]
        assert seeded[0].token_ids == seeded[1].token_ids != seeded[2].token_ids
        peer.close()
        peer.close()


def test_a_server_gets_the_same_file_threads_context_and_prompt(tiny, fake_server):
    peer = peers.ServerPeer(fake_server, tiny, ModelConfig(), EXACT, 256, "ngram-mod")
    assert os.getpgid(peer._process.pid) != os.getpgid(0), "Ctrl-Z in a terminal would stop it amid an answer"
    answer = peer.answer([5, 6], sampling=SamplingConfig(temperature=0.8, seed=3), max_tokens=8)
    assert answer.token_ids == [7] * 8
    assert (answer.stats.emitted, answer.stats.drafted, answer.stats.accepted, answer.stats.steps) == (8, 16, 4, 4)
    assert answer.stats.decode_seconds == pytest.approx(0.016)
    with pytest.raises(ModelError, match=r"400: .*too long"):
        peer.answer([5] * 300, sampling=GREEDY, max_tokens=8)
    peer.forget()
    peer.close()
    peer.close()
    (command, _again), requests = logged(fake_server)
    options = dict(zip(command[::2], command[1::2], strict=True))
    wanted = {"--model": str(tiny.path), "--threads": "1", "--ctx-size": "256", "--flash-attn": "on"}
    wanted |= {"--cache-type-k": "bf16", "--spec-type": "ngram-mod", "--gpu-layers": "0", "--parallel": "1"}
    assert wanted.items() <= options.items()
    assert requests[0]["prompt"] == [5, 6]
    assert (requests[0]["temperature"], requests[0]["seed"], requests[0]["top_k"]) == (0.8, 3, 40)


def test_a_terminated_suite_leaves_no_server_behind(tiny_path, fake_server, folder, tmp_path):
    output = tmp_path / "out.jsonl"
    more = ["-m", tiny_path, "--draft", "none", "--no-peers", "--llama-server", fake_server, "--repeats", 1000]
    words = [sys.executable, "-m", "racer_local", *map(str, suite_command(folder, output, *more))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        while not (output.exists() and output.read_bytes().count(b"\n") > 2) and child.poll() is None:
            sleep(0.05)
        child.terminate()
        out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert json.loads(out.splitlines()[-1])["temperatures"]["0"]["total"]["llama-server"]["answers"] > 0
    ports = [command[command.index("--port") + 1] for command in logged(fake_server)[0]]
    for port in ports:
        with socket.socket() as asked:
            assert asked.connect_ex(("127.0.0.1", int(port))), "nobody listens any more"


def test_a_server_that_is_interrupted_while_it_loads_is_ended(tiny, fake_server, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    started, popen = [], subprocess.Popen
    monkeypatch.setattr(peers, "sleep", interrupted)
    monkeypatch.setattr(peers.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    with pytest.raises(KeyboardInterrupt):
        peers.ServerPeer(fake_server, tiny, ModelConfig(), EXACT, 256, "none")
    assert started[0].poll() is not None


def test_a_server_that_ends_says_why(tiny, fake_server):
    with pytest.raises(ModelError, match="ended before it was ready; it said: error: no such model"):
        peers.ServerPeer(fake_server, tiny, ModelConfig(), EXACT, 256, "broken")


def test_peers_are_ways_of_a_suite_and_one_that_fails_is_kept_out_of_the_sums(tiny, fake_server, folder):
    plan = suite.Plan(drafts=("none",), temperatures=(0.0,), max_tokens=4, server=fake_server, spec_types=("none",))
    assert plan.names == ["none", "llama-cpp-python", "llama-cpp-python+lookup", "llama-server"]
    questions = [*read_folder(folder, 1), Question("qa", ["y" * 220], "long")]
    records = measured(tiny, plan, questions)
    assert "too long" in records[-1].turns[0]["llama-server"].error
    assert records[-1].sums("llama-server") is None
    assert records[0].sums("llama-server").tokens == 4
    assert records[0].sums("llama-cpp-python").differs is None
    with pytest.raises(ConfigError, match="--spec-types names nonsense; what there is: none, ngram-simple, ngram-mod"):
        _ = suite.Plan(server=fake_server, spec_types=("nonsense",)).kinds


def test_prompts_of_ones_own_can_be_lengthened_and_drafted_from_indexes_without_a_file(
    tiny_path, tiny, tmp_path, capsys
):
    create(tmp_path / "i", tiny.id, part_of(list(range(40, 90))))
    data = write_lines(tmp_path / "q.jsonl", *({"prompt": f"hello {i}"} for i in range(3)))
    flags = ["--draft", "racer,racer+corpus", "--corpus", tmp_path / "i", "--no-peers", "--temperature", 0]
    more = ["--context-tokens", 20, 400, "--max-tokens", 2, *EXACT_FLAGS]
    code, out, err = run(capsys, "bench", "suite", "-m", tiny_path, "--data", data, *flags, *more)
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])["temperatures"]["0"]
    assert list(found) == ["20 tokens", "total"], "the others do not fit"
    assert found["total"].keys() == {"none", "racer", "racer+corpus"}
    assert found["total"]["none"]["answers"] == 3


def test_peers_for_which_there_is_no_memory_are_refused(tiny, monkeypatch):
    monkeypatch.setattr(type(tiny), "memory_bytes", lambda *about: 1 << 60)
    plan = suite.Plan(drafts=("none",), temperatures=(0.0,))
    with pytest.raises(
        ModelError, match=r"for each of 2 peers takes about .* leave some out \(--no-peers, --spec-types\)"
    ):
        measured(tiny, plan, [])


def test_exact_answers_pass_the_same_tests_with_and_without_drafts(tiny_path, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(suite, "passes", lambda check, text: len(text.strip()) % 2 == 0)
    flags = ["--draft", "lookup,paper@8,racer", "--no-peers", "--temperature", 0, "--exact"]
    output, more = tmp_path / "out.jsonl", ["--threads", 1, "--ctx", 256, "--max-tokens", 24]
    command = ["bench", "suite", "-m", tiny_path, "--data-dir", folder, "-o", output, *flags, *more]
    assert run(capsys, *command)[0] == 0
    found = results.read(output)
    assert found.header["settings"]["exact"]
    view = found.at(0.0)
    assert view.sums("total", "paper@8").drafted > 0
    for way in found.ways:
        assert view.different("total", way) == (0, 8)
        assert view.passed(way) == view.passed("none")
    assert view.passed("none")[1] == 2
