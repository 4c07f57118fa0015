"""Models by name: the registry, finding a file, who else fetches it, and the command."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
import threading

import local_server
import pytest
from local_server import BODY, ENTRY, HUB_PATH, Page, Recorder, folder, half_there

from racer_local import models
from racer_local.cli import models as command
from racer_local.errors import DownloadError, ModelError
from racer_local.models import web

server, home, registry = local_server.server, local_server.home, local_server.registry


# The registry


def test_the_shipped_registry_is_valid_and_each_model_has_a_source():
    entries = models.load_registry()
    assert {"smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"} <= set(entries)
    assert all(entry.sources for entry in entries.values())
    assert len({entry.file for entry in entries.values()}) == len(entries)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"file": "../../evil"}, "plain file name"),
        ({"sha256": "abc"}, "64"),
        ({"size": "12"}, "size"),
        ({"size": True}, "size"),
        ({"size": 0}, "size"),
        ({"name": "Two Words"}, "one lower-case word"),
        ({"sources": []}, "at least one"),
        ({"sources": [{"kind": "ftp"}]}, "ftp"),
        ({"sources": [{"kind": "hub", "repo": "a/b"}]}, "file"),
        ({"sources": [{"kind": "pypi", "parts": [{"package": "x"}]}]}, "version"),
    ],
)
def test_a_wrong_registry_entry_is_named_in_one_line(registry, changed, word):
    registry(**changed)
    with pytest.raises(ModelError, match=word) as caught:
        models.load_registry()
    assert "\n" not in str(caught.value)


def test_a_registry_that_is_no_json_is_a_model_error(registry, tmp_path):
    (tmp_path / "registry.json").write_text("{")
    with pytest.raises(ModelError, match="can't read the model registry"):
        models.load_registry()


def test_two_models_of_one_name_are_refused(registry, tmp_path):
    (tmp_path / "registry.json").write_text(json.dumps({"models": [ENTRY, ENTRY]}))
    with pytest.raises(ModelError, match="twice"):
        models.load_registry()


# find


def test_find_says_how_to_fetch_a_known_model_that_is_not_there(registry):
    with pytest.raises(ModelError, match="run: racer-local models fetch tiny"):
        models.find("tiny")


def test_find_gives_the_path_of_a_fetched_model(registry, home):
    half_there(home, None, BODY, "m.gguf")
    assert models.find("tiny") == folder(home) / "m.gguf"


def test_find_reports_a_fetched_model_of_the_wrong_size(registry, home):
    half_there(home, None, BODY[:-1], "m.gguf")
    with pytest.raises(ModelError, match="damaged"):
        models.find("tiny")


def test_find_takes_any_other_text_as_a_path(registry, tmp_path):
    (tmp_path / "own.gguf").write_bytes(b"x")
    assert models.find(tmp_path / "own.gguf") == tmp_path / "own.gguf"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("nonsense", "known names: tiny"),
        ("a/b.gguf", "no such file"),
        ("b.gguf", "no such file"),
        ("x" * 5000, "known"),
    ],
)
def test_find_explains_what_it_does_not_find(registry, text, word):
    with pytest.raises(ModelError, match=word):
        models.find(text)


def test_find_does_not_take_a_folder_for_a_model(registry, tmp_path):
    with pytest.raises(ModelError, match="is a folder"):
        models.find(tmp_path)


# The disk, and company


def test_too_little_room_is_told_before_the_download(registry, server, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(DownloadError, match=r"102 kB more are needed in .* but 1 kB are free; make room"):
        models.fetch("tiny")
    assert server.seen == []


def test_a_folder_that_cannot_be_written_is_told_in_one_line(registry, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RACER_LOCAL_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="set RACER_LOCAL_HOME"):
        models.fetch("tiny")


def test_two_threads_that_fetch_the_same_model_download_it_once(registry, server):
    server.pages[HUB_PATH] = Page(BODY, wait_s=0.3)
    watchers = [Recorder(), Recorder()]
    threads = [threading.Thread(target=models.fetch, args=("tiny", watcher)) for watcher in watchers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert models.find("tiny").read_bytes() == BODY
    assert len(server.seen) == 1
    assert any("another process" in note for watcher in watchers for note in watcher.notes)


def test_two_processes_that_fetch_the_same_model_download_it_once(registry, server, tmp_path):
    server.pages[HUB_PATH] = Page(BODY, wait_s=0.5)
    code = (
        "import sys, pathlib; from racer_local.models import fetch, registry\n"
        "registry.registry_path = lambda: pathlib.Path(sys.argv[1])\n"
        "print(fetch('tiny'))"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "registry.json")]
    children = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = [child.communicate(timeout=30)[0].strip() for child in children]
    assert paths == [str(models.find("tiny"))] * 2
    assert models.find("tiny").read_bytes() == BODY
    assert len(server.seen) == 1


# The command


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["models", *words])
    return args.run(args)


def test_list_shows_a_row_for_each_model_and_whether_it_is_here(registry, home, capsys):
    assert run("list") == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "SIZE", "LICENCE", "STATE", "DESCRIPTION"]
    assert row == "tiny  102 kB  Apache-2.0  not fetched  a test"
    half_there(home, None, BODY, "m.gguf")
    run("list")
    assert " here " in capsys.readouterr().out


def test_list_as_json_has_what_a_program_needs(registry, home, capsys):
    assert run("list", "--json") == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["name"] == "tiny"
    assert record["fetched"] is False
    assert record["path"] == str(folder(home) / "m.gguf")


def test_fetch_prints_the_path_on_stdout_and_ten_lines_of_progress_elsewhere(registry, server, capsys, monkeypatch):
    monkeypatch.setattr(web, "CHUNK", 1024)
    server.pages[HUB_PATH] = Page(BODY)
    assert run("fetch", "tiny") == 0
    out, err = capsys.readouterr()
    assert out == f"{models.find('tiny')}\n"
    lines = err.splitlines()
    assert lines[0] == "tiny: 102 kB, licence: Apache-2.0 (https://example.org)"
    assert len([line for line in lines if "%" in line]) == 10
    assert "100%" in lines[-1]
    assert "\r" not in err


def test_path_prints_nothing_but_the_path(registry, home, capsys):
    half_there(home, None, BODY, "m.gguf")
    assert run("path", "tiny") == 0
    assert capsys.readouterr() == (f"{folder(home) / 'm.gguf'}\n", "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_the_progress_stays_on_one_line(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(command.time, "monotonic", lambda: float(next(clock)))
    out = Terminal()
    bar = command.ProgressBar(out)
    for done in (0, 50_000_000, 100_000_000):
        bar.advance(done, 100_000_000)
    bar.close()
    assert out.getvalue().count("\n") == 1
    last = out.getvalue().split("\r")
    assert "50%  50 MB of 100 MB  50 MB/s  0:01 left" in last[2]
    assert "100%" in last[3]


def test_progress_without_a_known_total_counts_bytes():
    out = io.StringIO()
    bar = command.ProgressBar(out)
    for done in range(0, 120_000_001, 10_000_000):
        bar.advance(done, None)
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["50 MB", "100 MB"]
