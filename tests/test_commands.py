"""What all commands have in common: help with examples, messages on stderr, completion, exit codes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from racer_local import cli
from racer_local.cli.manual import BEGIN, END, renewed
from racer_local.cli.parsing import EXIT_CODES, leaves

README = Path(__file__).parent.parent / "README.md"
LEAVES = list(leaves(cli.build_parser()))


@pytest.fixture(autouse=True)
def _trusted_build(monkeypatch):
    monkeypatch.setenv("RACER_LOCAL_SKIP_PROBE", "1")


def run(capsys, *args):
    try:
        code = cli.main([*map(str, args)])
    except SystemExit as error:
        code = error.code
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.prog)
def test_every_command_has_an_example_that_parses(leaf):
    examples = leaf.get_default("examples")
    assert examples
    for example in examples:
        command = example.split(" | ")[-1]
        assert command.startswith(leaf.prog)
        words = shlex.split(command)
        words = [
            word for i, word in enumerate(words) if "<" not in (word, words[i - 1]) and ">" not in (word, words[i - 1])
        ]
        assert cli.build_parser().parse_args(words[1:]).run


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.prog)
def test_help_names_what_must_be_given_and_fits_the_width(leaf, monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    parser = next(each for each in leaves(cli.build_parser()) if each.prog == leaf.prog)
    text = parser.format_help()
    usage = text.splitlines()[0]
    for action in parser._actions:
        if action.required and action.option_strings:
            assert action.option_strings[0] in usage
    described = text.split("examples:")[0]
    assert all(len(line) <= 72 for line in described.splitlines()[1:]), described


def test_the_readme_has_the_help_of_every_command_as_it_is_now(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = README.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    assert renewed(text) == text, "run: make readme"


def test_python_m_is_the_command():
    command = [sys.executable, "-m", "racer_local", "--version"]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    assert child.stdout.startswith("racer-local ")


def test_quiet_leaves_errors_alone_on_stderr(capsys, tiny_path):
    args = [
        "generate",
        "-m",
        tiny_path,
        "-p",
        "hello",
        "--threads",
        "1",
        "--draft",
        "none",
        "--max-tokens",
        "3",
        "--quiet",
    ]
    code, out, err = run(capsys, *args)
    assert (code, err) == (0, "")
    assert out
    code, out, err = run(capsys, *args, "--ctx", "8")
    assert (code, out) == (2, "")
    assert err.startswith("racer-local: error: ")


def test_log_json_makes_every_line_of_stderr_an_object(capsys, tiny_path):
    args = [
        "generate",
        "-m",
        tiny_path,
        "-p",
        "hello",
        "--threads",
        "1",
        "--draft",
        "none",
        "--max-tokens",
        "3",
        "--log-json",
    ]
    code, _, err = run(capsys, *args, "--ctx", "100000")
    assert code == 0
    lines = [json.loads(line) for line in err.splitlines()]
    assert all({"time", "level", "message"} <= line.keys() for line in lines)
    assert "the model was trained on" in lines[0]["message"]
    assert lines[-1]["draft"] == "none"
    code, _, err = run(capsys, *args, "--ctx", "8")
    assert code == 2
    assert json.loads(err)["level"] == "error"


def test_the_exit_codes_are_documented(capsys):
    _, out, _ = run(capsys, "--help")
    for code, meaning in EXIT_CODES.items():
        assert f"{code:<4} {meaning}" in out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh", "powershell"])
def test_a_completion_names_the_commands(capsys, shell):
    code, out, err = run(capsys, "completion", shell)
    assert (code, err) == (0, "")
    for name in cli.COMMANDS:
        assert name in out


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not here")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["gen"], "generate"),
        (["bench", "re"], "record replay report"),
        (["generate", "--max-n"], "--max-nodes"),
        (["generate", "--kv-type", "q"], "q8_0"),
        (["models", "fetch", "--qu"], "--quiet"),
    ],
)
def test_bash_completes_commands_options_and_choices(capsys, tmp_path, words, offered):
    _, script, _ = run(capsys, "completion", "bash")
    (tmp_path / "completion").write_text(script)
    line = shlex.join(["racer-local", *words])
    code = (
        f"source {tmp_path}/completion; COMP_WORDS=({line}); COMP_CWORD={len(words)}; "
        f'_shtab_racer_local racer-local "{words[-1]}" ""; echo "${{COMPREPLY[@]}}"'
    )
    child = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert sorted(child.stdout.split()) == sorted(offered.split())


def test_output_that_nobody_reads_ends_a_command_quietly(tiny_path):
    command = f"{shlex.quote(sys.executable)} -m racer_local generate --help | head -1"
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    child = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env)
    assert "Traceback" not in child.stderr
