"""racer-local run: what a line asks, what a kill leaves, and what lines that begin alike share."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time

import pytest

from racer_local import cli
from racer_local.config import ContextConfig, DraftConfig, SamplingConfig
from racer_local.errors import ConfigError
from racer_local.offline.journal import Journal, encoded
from racer_local.offline.lines import Defaults, read_line, read_lines
from racer_local.offline.work import Done, answer_all, by_prefix
from racer_local.session import Session

FAST = ["--threads", "1", "--ctx", "512", "--max-tokens", "6"]
DEFAULTS = Defaults(max_tokens=6)
TIMED = ("stats", "created")
"""Of a record: what is another one every time."""


@pytest.fixture(autouse=True)
def _trusted_build(monkeypatch):
    monkeypatch.setenv("RACER_LOCAL_SKIP_PROBE", "1")


def line_of(**fields):
    return read_line(7, json.dumps(fields).encode(), DEFAULTS)


def batch(**body):
    return {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": body}


USER = [{"role": "user", "content": "hi"}]


def test_a_prompt_is_a_users_message_and_has_the_default_number_of_tokens():
    line = line_of(id="a", prompt="hi", temperature=0.5)
    assert (line.id, line.batch, line.error) == ("a", False, None)
    request = line.asked.request
    assert [message.plain() for message in request.messages] == USER
    assert (request.temperature, line.asked.most) == (0.5, 6)


def test_a_system_message_is_put_before_lines_that_have_none():
    defaults = Defaults(6, system="Be short.")
    own = [{"role": "system", "content": "Be long."}, *USER]
    for fields, first in [({"prompt": "hi"}, "Be short."), ({"messages": USER}, "Be short.")]:
        line = read_line(1, json.dumps(fields).encode(), defaults)
        assert line.asked.request.messages[0].content == first
    line = read_line(1, json.dumps({"messages": own}).encode(), defaults)
    assert [message.content for message in line.asked.request.messages] == ["Be long.", "hi"]


def test_openais_batch_shape_is_taken_with_what_it_says_of_streaming_left_out():
    line = line_of(**batch(model="gpt-4o", messages=USER, max_completion_tokens=3, stream=True))
    assert (line.id, line.batch, line.error, line.asked.most) == ("x", True, None, 3)
    text = line_of(custom_id="y", url="/v1/completions", body={"prompt": "def f("})
    assert (text.kind.prefix, text.asked.most) == ("cmpl", 6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "must be one of"),
        ({"prompt": "a", "messages": USER}, "must be one of"),
        ({"prompt": 3}, "prompt: it must be a text"),
        ({"prompt": "a", "temprature": 1}, "temprature: there is no such field"),
        ({"prompt": "a", "temperature": "hot"}, "temperature: "),
        ({"prompt": "a", "raw": "yes"}, "raw must be true or false"),
        ({"prompt": "a", "raw": True, "system": "b"}, "a raw prompt has none"),
        ({"prompt": "a", "id": {"a": 1}}, "an id must be a text or a number"),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role: "),
        (batch(messages=USER) | {"url": "/v1/embeddings"}, '"/v1/embeddings" can\'t be asked here'),
        (batch(messages=USER) | {"method": "GET"}, "only POST"),
        (batch(messages=USER) | {"more": 1}, "more: no such field beside a body"),
        ({"custom_id": "a", "body": "text"}, "body: it must be an object"),
    ],
)
def test_a_line_that_asks_nothing_says_why(fields, message):
    line = line_of(**fields)
    assert line.asked is None
    assert message in str(line.error)
    assert "\n" not in str(line.error)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{", "no JSON"),
        (b"[1]", "must be an object"),
        (b'{"prompt": "\xff"}', "no UTF-8 text (byte 12)"),
        (b"[" * 100_000, "no JSON"),
        (b'{"prompt": "a"} {"prompt": "b"}', "no JSON"),
    ],
)
def test_bytes_that_are_no_request_say_why(raw, message):
    assert message in str(read_line(1, raw, DEFAULTS).error)


def test_the_number_of_a_line_without_an_id_takes_none_away():
    raws = [b'{"prompt": "a"}', b"broken", b'{"id": 1, "prompt": "b"}', b'{"id": 2, "prompt": "c"}']
    lines = list(read_lines(raws, DEFAULTS))
    assert [line.error is None for line in lines] == [True, False, True, True]


def test_blank_lines_are_none_and_an_id_can_be_used_once():
    raws = [b'\xef\xbb\xbf{"id": "a", "prompt": "1"}\n', b"\n", b'{"id": "a", "prompt": "2"}', b'{"prompt": "3"}']
    lines = list(read_lines(raws, DEFAULTS))
    assert [(line.number, line.id) for line in lines] == [(1, "a"), (3, "a"), (4, 4)]
    assert [line.error is None for line in lines] == [True, False, True]
    assert "is that of line 1 too" in str(lines[1].error)


def journal(path, settings=None, *, resume=False, overwrite=False):
    return Journal(path, settings or {"model": "m"}, resume=resume, overwrite=overwrite)


def test_a_journal_goes_on_with_what_was_whole_and_cuts_what_was_not(tmp_path):
    out = tmp_path / "out.jsonl"
    with journal(out) as first:
        first.add(2, "two", {"id": 2})
        first.add(1, "one", {"id": 1})
    with open(first.path, "ab") as file:
        file.write(b'{"line": 3, "digest": "three", "rec')
    with journal(out, resume=True) as second:
        assert {number: digest for number, (digest, _) in second.answered.items()} == {1: "one", 2: "two"}
        second.add(3, "three", {"id": 3})
        second.finish([1, 2, 3], {})
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl"]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_journal_that_was_cut_anywhere_in_its_last_line_loses_that_line_alone(tmp_path, cut):
    with journal(tmp_path / "out") as first:
        first.add(1, "one", {"id": 1})
        first.add(2, "two", {"id": 2, "text": "é漢"})
    os.truncate(first.path, first.path.stat().st_size - cut)
    with journal(tmp_path / "out", resume=True) as second:
        assert set(second.answered) == {1}
        second.add(2, "two", {"id": 2})
        second.finish([1, 2], {})
    assert (tmp_path / "out").read_text().count("\n") == 2


def test_a_journal_stays_where_lines_are_errors_so_that_mended_ones_can_be_answered(tmp_path):
    out = tmp_path / "out"
    with journal(out) as first:
        first.add(1, "one", {"id": 1, "error": None})
        first.finish([1, 2], {2: {"id": 2, "error": {}}})
    with journal(out, resume=True) as second:
        second.add(2, "mended", {"id": 2, "error": None})
        second.finish([1, 2], {})
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"id": 1, "error": None},
        {"id": 2, "error": None},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_nothing_of_an_earlier_run_is_touched_before_the_first_record(tmp_path):
    with journal(tmp_path / "out") as first:
        first.add(1, "one", {"id": 1})
    kept = first.path.read_bytes()
    with journal(tmp_path / "out", {"model": "other"}, overwrite=True):
        pass
    assert first.path.read_bytes() == kept
    with journal(tmp_path / "fresh"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.part"]


@pytest.mark.parametrize("text", ["mine", "mine\n", '{"prompt": "a"}\n'])
def test_a_file_that_is_no_journal_is_left_alone(tmp_path, text):
    (tmp_path / "out.part").write_text(text)
    with pytest.raises(ConfigError, match=r"out.part is (no journal|damaged at byte 0)"):
        journal(tmp_path / "out", resume=True)
    assert (tmp_path / "out.part").read_text() == text


def test_a_header_that_a_kill_cut_is_written_again(tmp_path):
    (tmp_path / "out.part").write_text('{"racer_local_r')
    with journal(tmp_path / "out", resume=True) as mended:
        mended.add(1, "one", {"id": 1})
    with journal(tmp_path / "out", resume=True) as again:
        assert set(again.answered) == {1}


def test_the_output_that_a_kill_left_beside_its_journal_is_written_again(tmp_path):
    out = tmp_path / "out"
    with journal(out) as first:
        first.add(1, "one", {"id": 1})
    out.write_text("what was there")
    with journal(out, resume=True) as second:
        second.finish([1], {})
    assert out.read_bytes() == encoded({"id": 1})


def test_a_link_stays_one_and_what_it_names_is_written(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with journal(tmp_path / "link") as first:
        first.finish([1], {1: {"id": 1}})
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "out").read_bytes() == encoded({"id": 1})


def test_what_an_earlier_run_left_is_not_touched_unasked(tmp_path):
    out = tmp_path / "out"
    with journal(out) as first:
        first.add(1, "one", {"id": 1})
    kept = first.path.read_bytes()
    for change, message in [
        ({}, "--resume"),
        ({"settings": {"model": "n"}, "resume": True}, "another model"),
    ]:
        with pytest.raises(ConfigError, match=message):
            journal(out, **change)
        assert first.path.read_bytes() == kept
    with journal(out, overwrite=True) as second:
        assert not second.answered
        second.finish([], {})
    with pytest.raises(ConfigError, match="is there already"):
        journal(out)


def test_a_damaged_journal_is_refused(tmp_path):
    with journal(tmp_path / "out") as first:
        first.add(1, "one", {"id": 1})
        first.add(2, "two", {"id": 2})
    text = first.path.read_text().replace('"digest": "one"', '"digest"')
    first.path.write_text(text)
    with pytest.raises(ConfigError, match="is damaged at byte"):
        journal(tmp_path / "out", resume=True)
    assert first.path.read_text() == text


def test_two_runs_do_not_write_one_file(tmp_path):
    with journal(tmp_path / "out"), pytest.raises(ConfigError, match="another run is writing"):
        journal(tmp_path / "out", resume=True)


def test_half_a_surrogate_pair_stays_json():
    assert json.loads(encoded({"id": "\udc80"})) == {"id": "\udc80"}


@pytest.fixture(scope="module")
def session(tiny):
    context = ContextConfig(n_ctx=1024, threads=1)
    with Session(tiny, context, DraftConfig(draft="lookup")) as session:
        yield session


def answered(session, lines, stopped=lambda: False):
    done = Done()
    return list(answer_all(session, lines, SamplingConfig(), stopped, done)), done


def test_what_lines_share_is_evaluated_once(session):
    session.forget()
    system = [{"role": "system", "content": "long " * 100}]
    asks = [[*system, {"role": "user", "content": f"{word} {i}"}] for i in range(8) for word in ("one", "two")]
    raws = [json.dumps({"messages": messages, "max_tokens": 2}).encode() for messages in asks]
    lines = list(read_lines(raws, DEFAULTS))
    prompts = [line.asked.prepare(session).prompts[0] for line in lines]
    # What a cache that forgot nothing would read: every beginning once. The last token of a prompt is not prefilled.
    beginnings = {tuple(prompt[:n]) for prompt in prompts for n in range(1, len(prompt) + 1)}
    _, done = answered(session, by_prefix(session, lines))
    assert done.stats.prompt_tokens == sum(map(len, prompts)) > 6900
    assert done.read_tokens <= len(beginnings) + len(lines) < 900


def test_an_order_by_prefix_keeps_every_line(session):
    raws = [json.dumps({"prompt": text}).encode() for text in ("b", "a", "c" * 5000, "ab", "b")]
    raws.append(b"nonsense")
    lines = list(read_lines(raws, DEFAULTS))
    assert sorted(line.number for line in by_prefix(session, lines)) == [1, 2, 3, 4, 5, 6]


def test_a_prompt_that_does_not_fit_is_a_record_and_the_next_line_is_answered(session):
    raws = [json.dumps({"prompt": text}).encode() for text in ("long " * 2000, "short")]
    records, done = answered(session, list(read_lines(raws, DEFAULTS)))
    assert records[0][1]["error"]["code"] == "context_length_exceeded"
    assert records[0][1]["text"] is None
    assert records[1][1]["error"] is None
    assert (done.answered, done.errors) == (1, 1)


@pytest.mark.parametrize("corpus", ["\0", "\ud800", "missing.index"])
def test_what_one_line_brings_about_is_its_own_error(session, corpus):
    raws = [json.dumps({"prompt": "a", "racer": {"draft": "racer", "corpora": [corpus]}}).encode(), b'{"prompt": "b"}']
    records, done = answered(session, list(read_lines(raws, DEFAULTS)))
    assert records[0][1]["error"]["message"]
    assert (done.answered, done.errors) == (1, 1)


def test_the_line_that_was_stopped_is_not_answered(session):
    count, most = 0, 10**9

    def stopped():
        nonlocal count
        count += 1
        return count > most

    lines = list(read_lines([b'{"prompt": "a"}', b'{"prompt": "b"}', b'{"prompt": "c"}'], Defaults(40)))
    whole, _ = answered(session, lines, stopped)
    count, most = 0, count * 2 // 3 + 1
    records, _ = answered(session, lines, stopped)
    assert 1 <= len(records) < len(whole) == 3
    assert all(record["usage"]["completion_tokens"] == 40 for _, record in records)


def run(capsys, *args):
    try:
        code = cli.main(["run", *map(str, args)])
    except SystemExit as error:
        code = error.code
    out = capsys.readouterr()
    return code, out.out, out.err


def untimed(record):
    if isinstance(record, dict):
        return {name: untimed(value) for name, value in record.items() if name not in (*TIMED, "racer", "usage")}
    return [untimed(value) for value in record] if isinstance(record, list) else record


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_and_stdout_get_the_same_records_in_the_order_of_the_input(capsys, tiny_path, tmp_path, monkeypatch):
    asks = [
        batch(messages=USER, n=2, temperature=0.9, seed=1),
        {"prompt": "b"},
        "no object",
        {"prompt": "a", "id": "z"},
    ]
    given = tmp_path / "in.jsonl"
    given.write_text("\n".join(map(json.dumps, asks)))
    args = ["-m", tiny_path, *FAST, "--draft", "lookup", "--exact"]
    code, out, err = run(capsys, given, "-o", tmp_path / "out.jsonl", *args)
    assert (code, out) == (3, "")
    assert "3 of 4 lines answered" in err
    found = records(tmp_path / "out.jsonl")
    assert [record["id"] for record in found] == ["x", 2, 3, "z"]
    assert [record["error"] is None for record in found] == [True, True, False, True]
    assert len(found[0]["texts"]) == len(found[0]["response"]["body"]["choices"]) == 2
    assert found[0]["response"]["body"]["choices"][0]["message"]["content"] == found[0]["text"] == found[0]["texts"][0]
    assert found[1]["usage"]["completion_tokens"] <= 6
    assert "mean_accepted_tokens" in found[1]["stats"]
    code, out, err = run(capsys, given, "-o", "-", *args, "--quiet")
    assert (code, err) == (3, "")
    assert [untimed(json.loads(line)) for line in out.splitlines()] == [untimed(record) for record in found]


@pytest.mark.parametrize(
    ("text", "args", "message"),
    [
        ("", [], "holds no requests"),
        ("{}\n{}\n", ["--max-errors", "1"], "2 of 2 lines can't be answered (--max-errors 1); the first is line 1: "),
        ('{"prompt": "a"}', ["--resume", "--overwrite"], "leave out one of them"),
        ('{"prompt": "a"}', ["--max-tokens", "0"], "--max-tokens must be at least 1"),
        ('{"prompt": "a"}', ["-o", "-", "--resume"], "can't be resumed"),
        ('{"prompt": "a"}', ["-o", "missing/out.jsonl"], "can't be written"),
        ('{"prompt": "a"}', ["-o", "in.jsonl", "--overwrite"], "would take the place of the requests"),
        ('{"prompt": "a"}', ["-o", "/dev/null"], "is no regular file"),
    ],
)
def test_what_can_not_be_run_is_one_line_and_leaves_nothing(
    capsys, tiny_path, tmp_path, monkeypatch, text, args, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(text)
    code, out, err = run(capsys, "in.jsonl", "-o", "out.jsonl", "-m", tiny_path, *FAST, *args)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.part", "out.jsonl.part.lock"])
def test_requests_in_a_file_that_would_be_written_are_spared(capsys, tiny_path, tmp_path, name):
    (tmp_path / name).write_text('{"prompt": "a"}\n')
    for flag in ("--resume", "--overwrite"):
        code, _, err = run(capsys, tmp_path / name, "-o", tmp_path / "out.jsonl", "-m", tiny_path, *FAST, flag)
        assert code == 2
        assert "would take the place of the requests" in err
        assert (tmp_path / name).read_text() == '{"prompt": "a"}\n'


def test_a_model_that_can_not_be_loaded_leaves_no_trace(capsys, tmp_path, tiny_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes([3, 0, 0, 0, 1]) + bytes(40))
    code, _, _ = run(capsys, tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "-m", tmp_path / "bad.gguf")
    assert code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.gguf", "in.jsonl"]


@pytest.mark.parametrize("given", ["missing.jsonl", "."])
def test_requests_that_can_not_be_read_are_one_line(capsys, tiny_path, tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, given, "-o", "out.jsonl", "-m", tiny_path)
    assert code == 2
    assert f"{given} can't be read" in err


def test_a_line_that_was_mended_is_answered_by_resuming(capsys, tiny_path, tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text('{"prompt": "a"}\n{"prompt": "%s"}\n{"prompt": "c"}\n' % ("long " * 2000))
    args = [given, "-o", out, "-m", tiny_path, *FAST, "--draft", "lookup", "--max-errors", "0"]
    code, _, err = run(capsys, *args)
    assert code == 3
    assert "stopped: 1 lines could not be answered" in err
    assert not out.exists()
    code, _, err = run(capsys, *args, "--resume")
    assert code == 3, "an error of before counts"
    assert "stopped: 1 lines could not be answered" in err
    given.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    code, _, err = run(capsys, *args, "--resume")
    assert code == 0
    assert [record["error"] for record in records(out)] == [None] * 3
    code, _, err = run(capsys, *args, "--resume")
    assert code == 0
    assert "all 3 lines were answered before" in err


def test_a_full_disk_says_so_and_loses_nothing(capsys, tiny_path, tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(40)))
    args = [given, "-o", out, "-m", tiny_path, *FAST, "--draft", "lookup"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, before[1]))
    try:
        code, _, err = run(capsys, *args)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1
    assert "make room, then the same command with --resume goes on" in err
    assert err.count("\n") == 1
    kept = len((tmp_path / "out.jsonl.part").read_bytes().split(b"\n")) - 2
    code, _, err = run(capsys, *args, "--resume")
    assert code == 0
    assert f"{kept} of 40 lines were answered before" in err
    assert len(records(out)) == 40


ZYGOTE = """
import os, signal, sys
from racer_local import cli, session, offline
from racer_local.cli import run
from racer_local.offline import journal, work
from racer_local.kernels import warm_up
warm_up()
print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os._exit(cli.main(sys.argv[1:] + line.split()))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A process that has imported all, and forks one that runs the command for each line: a kill costs no start."""


def size_of(path):
    return path.stat().st_size if path.exists() else 0


def test_a_run_that_is_killed_twenty_times_gives_the_file_of_an_unbroken_one(tiny_path, tmp_path):
    given, moments = tmp_path / "in.jsonl", random.Random(7)
    words = ["river", "stone", "cloud", "ember"]
    asks = [{"id": f"q{i}", "prompt": " ".join(moments.choices(words, k=12))} for i in range(300)]
    given.write_text("\n".join(map(json.dumps, asks)))
    options = ["-m", str(tiny_path), "--threads", "1", "--ctx", "512", "--max-tokens", "24", "--exact", "--quiet"]
    command = [sys.executable, "-c", ZYGOTE, "run", str(given), *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as zygote:

        def start(*args):
            zygote.stdin.write(" ".join(args) + "\n")
            zygote.stdin.flush()
            return int(zygote.stdout.readline())

        assert zygote.stdout.readline() == "ready\n"
        start("-o", str(tmp_path / "warm"))  # what is measured once is measured now
        assert int(zygote.stdout.readline()) == 0
        start("-o", str(tmp_path / "unbroken"))
        assert int(zygote.stdout.readline()) == 0

        out, part, sizes = tmp_path / "broken", tmp_path / "broken.part", [0]
        for kill in range(20):
            child = start("-o", str(out), "--resume")
            deadline = time.monotonic() + (60 if kill % 4 else moments.uniform(0, 1))  # now and then while it opens
            while size_of(part) == sizes[-1] and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(moments.uniform(0, 0.06))
            os.kill(child, signal.SIGKILL)
            assert int(zygote.stdout.readline()) == -signal.SIGKILL, "it ended before it was killed"
            sizes.append(size_of(part))
        assert sizes == sorted(sizes), "what was answered is never answered again"
        assert len(set(sizes)) > 12
        start("-o", str(out), "--resume")
        assert int(zygote.stdout.readline()) == 0
        zygote.stdin.close()
    assert [untimed(record) for record in records(out)] == [
        untimed(record) for record in records(tmp_path / "unbroken")
    ]
    assert [record["id"] for record in records(out)] == [ask["id"] for ask in asks]
    assert not (tmp_path / "broken.part").exists()
