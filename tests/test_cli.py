"""The command line: what it prints, and one line for everything that is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from tiny_gguf import write_tiny_gguf

from racer_local import cli
from racer_local.cli.generate import describe
from racer_local.stats import GenerationStats

FAST = ["--threads", "1", "--ctx", "256"]


@pytest.fixture(autouse=True)
def _trusted_build(monkeypatch):
    monkeypatch.setenv("RACER_LOCAL_SKIP_PROBE", "1")


def run(capsys, *args):
    """(exit code, stdout, stderr) of a command in this process."""
    try:
        code = cli.main(list(args))
    except SystemExit as error:
        code = error.code
    out = capsys.readouterr()
    return code, out.out, out.err


def generate(capsys, path, *args, prompt="Hello world, hello world, hello"):
    return run(capsys, "generate", "-m", str(path), "-p", prompt, *FAST, *args)


def test_json_is_one_object_on_the_last_line_with_the_promised_keys(capsys, tiny_path):
    code, out, err = generate(capsys, tiny_path, "--json", "--draft", "paper", "--max-tokens", "40")
    assert code == 0
    answer = json.loads(out.splitlines()[-1])
    assert set(answer) == {"text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "stats"}
    assert set(answer["stats"]) == {
        "draft",
        "exact",
        "row_limit",
        "disabled_reason",
        "steps",
        "mean_accepted_tokens",
        "drafted",
        "accepted",
        "accepted_by_source",
        "prefill_seconds",
        "decode_seconds",
        "draft_seconds",
        "tokens_per_second",
    }
    assert len(answer["token_ids"]) == answer["completion_tokens"] == 40
    assert answer["finish_reason"] == "length"
    assert answer["stats"]["draft"] == "paper"
    assert sum(answer["stats"]["accepted_by_source"].values()) == answer["stats"]["accepted"]
    assert len(err.splitlines()) == 1


def test_the_streamed_text_is_the_text(capsys, tiny_path):
    args = ["--draft", "racer", "--max-tokens", "30"]
    _, streamed, err = generate(capsys, tiny_path, *args)
    _, out, _ = generate(capsys, tiny_path, *args, "--json")
    assert streamed == json.loads(out)["text"] + "\n"
    assert err.startswith("[racer] 30 tokens in ")


@pytest.mark.parametrize("draft", ["none", "lookup", "logits", "retrieval", "paper", "racer"])
def test_every_drafter_gives_the_same_ids_in_exact_settings(capsys, tiny_path, draft):
    exact = ["--flash-attn", "on", "--kv-type", "bf16", "--max-tokens", "60", "--json"]
    _, plain, _ = generate(capsys, tiny_path, *exact, "--draft", "none")
    _, drafted, _ = generate(capsys, tiny_path, *exact, "--draft", draft)
    assert json.loads(drafted)["token_ids"] == json.loads(plain)["token_ids"]


def test_compare_prints_both_speeds_and_whether_the_ids_agree(capsys, tiny_path):
    exact = ["--flash-attn", "on", "--kv-type", "bf16", "--max-tokens", "40", "--compare", "--draft", "paper"]
    code, out, err = generate(capsys, tiny_path, *exact, "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["same_token_ids"] is True
    assert answer["first_difference"] is None
    assert answer["plain"]["token_ids"] == answer["token_ids"]
    assert answer["speed_up"] == pytest.approx(
        answer["stats"]["tokens_per_second"] / answer["plain"]["stats"]["tokens_per_second"], rel=1e-2
    )
    plain, drafted, verdict = err.splitlines()
    assert plain.startswith("[none] 40 tokens")
    assert drafted.startswith("[paper] 40 tokens")
    assert verdict.endswith("the same 40 token ids")


def test_a_seed_gives_the_same_answer_drafted_or_not(capsys, tiny_path):
    exact = ["--flash-attn", "on", "--kv-type", "bf16", "--max-tokens", "60", "--json", "--temperature", "0.9"]
    ids = [
        json.loads(generate(capsys, tiny_path, *exact, "--seed", seed, "--draft", draft)[1])["token_ids"]
        for seed, draft in (("7", "none"), ("7", "paper"), ("8", "none"))
    ]
    assert ids[0] == ids[1]
    assert ids[0] != ids[2]


def test_the_prompt_can_come_from_stdin_and_raw_skips_the_template(tiny_path):
    command = [sys.executable, "-m", "racer_local", "generate", "-m", str(tiny_path), "-p", "-", *FAST]
    command += ["--raw", "--max-tokens", "3", "--json"]
    child = subprocess.run(command, input="héllo".encode(), capture_output=True, check=True)
    answer = json.loads(child.stdout)
    assert answer["prompt_tokens"] <= 8
    assert answer["completion_tokens"] == 3


def test_max_tokens_zero_prints_nothing(capsys, tiny_path):
    code, out, _ = generate(capsys, tiny_path, "--max-tokens", "0", "--json")
    assert code == 0
    assert json.loads(out)["token_ids"] == []
    assert json.loads(out)["finish_reason"] == "length"


# --- what is wrong is said in one line ---


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory, tiny_path):
    folder = tmp_path_factory.mktemp("bad")
    (folder / "text.gguf").write_text("this is no model")
    (folder / "empty.gguf").write_bytes(b"")
    whole = tiny_path.read_bytes()
    (folder / "truncated.gguf").write_bytes(whole[: len(whole) * 3 // 4])
    (folder / "header.gguf").write_bytes(whole[:200])
    write_tiny_gguf(folder / "vocabulary.gguf", vocab_only=True)
    (folder / "folder.gguf").mkdir()
    return folder


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("missing.gguf", "give the path of a GGUF file or one of smollm2-135m"),
        ("folder.gguf", "is a folder; name the .gguf file in it"),
        ("text.gguf", "is no GGUF file"),
        ("empty.gguf", "is no GGUF file"),
        ("truncated.gguf", "is truncated or damaged"),
        ("header.gguf", "fetch it again"),
        ("vocabulary.gguf", "holds a vocabulary and no weights; use the whole model file"),
    ],
)
def test_a_bad_model_file_is_one_line_that_says_what_to_change(capfd, bad_files, file, message):
    code, out, err = run(capfd, "generate", "-m", str(bad_files / file), "-p", "hello")
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("racer-local: error: ")
    assert message in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--threads", "0"], "threads is 0; it must be from 1"),
        (["--max-nodes", "1000"], "max_nodes is 1000; it must be from 1 to 255"),
        (["--max-nodes", "0"], "max_nodes is 0"),
        (["--ctx", "4"], "n_ctx (--ctx) is 4"),
        (["--max-tokens", "-1"], "--max-tokens is -1"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--temperature", "hot"], "invalid float value: 'hot'"),
        (["--draft", "eagle"], "invalid choice: 'eagle'"),
        (["--kv-type", "q8_0", "--flash-attn", "off"], "needs flash attention"),
        (["--system", "s", "--raw"], "leave out --raw"),
        (["--compare", "--temperature", "1"], "needs a --seed"),
        (["--context-option", "n_ctx=1"], "the context option n_ctx follows from other settings"),
        (["--context-option", "x"], "must be NAME=VALUE"),
        (["--model-option", "main_gpu=first"], "it must be a number, true or false"),
        (["--model-option", "gpu=1"], "the model has no option 'gpu'; known: "),
        (["--model-option", "tensor_split=1,x"], "it must be a number, true or false"),
        (["--no-such-flag"], "unrecognized arguments"),
    ],
)
def test_a_bad_setting_is_one_line_that_says_what_to_change(capfd, tiny_path, args, message):
    code, out, err = generate(capfd, tiny_path, *args)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(capfd, tiny_path, prompt):
    code, _, err = generate(capfd, tiny_path, prompt=prompt)
    assert code == 2
    assert err == "racer-local: error: the prompt is empty; give some text with -p, or on stdin with -p -\n"


def test_a_prompt_longer_than_the_context_says_both_numbers(capfd, tiny_path):
    code, _, err = generate(capfd, tiny_path, prompt="word " * 300)
    assert code == 2
    assert err.count("\n") == 1
    assert "the context holds 256" in err
    assert "--ctx" in err


def test_a_model_name_that_is_not_fetched_says_how_to_fetch_it(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("RACER_LOCAL_HOME", str(tmp_path))
    code, _, err = run(capfd, "generate", "-m", "smollm2-135m", "-p", "x")
    assert code == 2
    assert "racer-local models fetch smollm2-135m" in err
    code, _, err = run(capfd, "generate", "-m", "smollm3", "-p", "x")
    assert code == 2
    assert "smollm2-135m" in err


def test_a_prompt_that_is_no_utf8_is_refused(tiny_path):
    command = [sys.executable, "-m", "racer_local", "generate", "-m", str(tiny_path), "-p", "-", *FAST]
    child = subprocess.run(command, input=b"caf\xe9", capture_output=True)
    assert child.returncode == 2
    assert child.stderr.startswith(b"racer-local: error: stdin is no UTF-8 text")
    assert child.stderr.count(b"\n") == 1


def test_a_context_beyond_the_models_training_is_noted(capsys, tiny_path):
    args = ["--max-tokens", "2", "--ctx", "8192", "--threads", "1"]
    _, _, err = run(capsys, "generate", "-m", str(tiny_path), "-p", "x", *args)
    assert err.startswith("racer-local: note: the model was trained on 4096 tokens")


@pytest.mark.parametrize("wait", [0.1, 0.2, 0.3, 0.4, 0.6])
def test_ctrl_c_while_the_model_loads_is_not_lost(tiny_path, wait):
    command = [sys.executable, "-m", "racer_local", "generate", "-m", str(tiny_path), "-p", "hello", "--raw"]
    command += ["--ctx", "100000", "--max-tokens", "90000", "--threads", "1", "--json"]
    # A shell's background job, as these tests may be, ignores SIGINT, and its children with it.
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed)
    time.sleep(wait)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert child.returncode in (130, -signal.SIGINT)
    assert b"Exception ignored" not in err


def test_ctrl_c_stops_at_once_and_prints_what_there_is(tiny_path):
    command = [sys.executable, "-m", "racer_local", "generate", "-m", str(tiny_path), "-p", "hello", "--raw"]
    command += ["--ctx", "200000", "--max-tokens", "190000", "--threads", "1", "--draft", "none"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"LANG": "C"})
    first = child.stdout.read(20)
    child.send_signal(signal.SIGINT)
    pressed = time.monotonic()
    rest, err = child.communicate(timeout=30)
    assert time.monotonic() - pressed < 10
    assert child.returncode == 130
    assert b"Traceback" not in err
    assert err.decode().splitlines()[-1].startswith("[none] ")
    assert len(first + rest) > 20


def test_an_interrupted_compare_claims_nothing(tiny_path):
    command = [sys.executable, "-m", "racer_local", "generate", "-m", str(tiny_path), "-p", "hello", "--raw"]
    command += ["--ctx", "100000", "--max-tokens", "90000", "--threads", "1", "--compare", "--json"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(6)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 130
    assert out == b""
    assert err.decode().splitlines()[-1] == "interrupted: there are no two whole answers to compare"
    assert b"the same" not in err


def test_a_reader_that_goes_away_ends_the_answer_without_a_traceback(tiny_path):
    command = [sys.executable, "-m", "racer_local", "generate", "-m", str(tiny_path), "-p", "hello", *FAST]
    child = subprocess.Popen([*command, "--max-tokens", "200"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.read(1)
    child.stdout.close()
    err = child.stderr.read().decode()
    child.wait(30)
    assert "Traceback" not in err
    assert "Exception" not in err


def test_a_terminal_without_unicode_does_not_end_the_answer(tiny_path):
    command = [sys.executable, "-m", "racer_local", "generate", "-m", str(tiny_path), "-p", "hello", *FAST]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    child = subprocess.run([*command, "--max-tokens", "100"], capture_output=True, env=env)
    assert child.returncode == 0
    assert b"Traceback" not in child.stderr


def test_describe_names_the_sources_that_were_accepted():
    stats = GenerationStats(draft="paper", emitted=10, steps=4, drafted=40, accepted=6, decode_seconds=2.0)
    stats.accepted_by_source["logits"] = 6
    assert "5.0 tokens/s, 4 forwards, MAT 2.50, accepted 6 of 40 drafted (logits 6)" in describe(stats)


def test_bench_draft_ends_with_json(capsys):
    args = ["--nodes", "8", "--vocab", "200", "--context", "200", "--steps", "100"]
    code, out, _ = run(capsys, "bench", "draft", *args)
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert set(result["milliseconds"]) == {"draft", "top_k", "observe", "accept", "total"}
    assert result["mean_nodes"] > 1


def test_bench_ids_counts_the_answers_that_are_equal(capsys, tiny_path, tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"turns": ["hello hello hello", "x"]}\n{"prompt": "one two one two"}\n')
    args = ["--data", str(data), "--drafts", "lookup,paper", "--max-tokens", "30", "--flash-attn", "on"]
    code, out, _ = run(capsys, "bench", "ids", "-m", str(tiny_path), *FAST, *args, "--kv-type", "bf16")
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert set(result) == {"lookup", "paper"}
    for sums in result.values():
        assert (sums["equal"], sums["of"], sums["largest_gap"]) == (2, 2, None)
        assert sums["mean_accepted_tokens"] > 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ids", "--data", "x.jsonl", "--limit", "0"], "--limit and --max-tokens must be at least 1"),
        (["ids", "--data", "missing.jsonl"], "missing.jsonl can't be read"),
        (["memory", "--draft", "eagle", "--ctx", "256"], "the measured process ended with code 2"),
    ],
)
def test_a_bench_that_cannot_be_run_says_why(capsys, tiny_path, args, message):
    code, out, err = run(capsys, "bench", args[0], "-m", str(tiny_path), *args[1:])
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("line", ["no json", "[]", '{"text": 1}', '{"turns": []}'])
def test_bench_ids_says_what_a_data_file_must_hold(capsys, tiny_path, tmp_path, line):
    data = tmp_path / "prompts.jsonl"
    data.write_text(line)
    code, _, err = run(capsys, "bench", "ids", "-m", str(tiny_path), "--data", str(data))
    assert code == 2
    assert err.count("\n") == 1
    assert "must hold a JSON object a line" in err


@pytest.mark.parametrize("args", [[], ["generate"], ["models"], ["bench"], ["nonsense"]])
def test_an_incomplete_command_is_one_line(capsys, args):
    code, out, err = run(capsys, *args)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1


def test_every_command_has_help(capsys):
    for args in (["--help"], ["generate", "--help"], ["models", "--help"], ["doctor", "--help"], ["bench", "--help"]):
        code, out, _ = run(capsys, *args)
        assert code == 0
        assert "usage: racer-local" in out
