"""Models by name: the registry, finding a file, who else fetches it, and the command."""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import sys

import local_server
import pytest
from local_server import BODY, HUB_PATH, Page

from racer_local import models
from racer_local.cli import models as command
from racer_local.errors import DownloadError, ModelError
from racer_local.models import download

server, home, registry = local_server.server, local_server.home, local_server.registry


def test_the_shipped_registry_says_all_that_a_fetch_needs():
    entries = models.load_registry()
    assert {"smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"} <= set(entries)
    listed = json.loads(models.registry.registry_path().read_text("utf-8"))["models"]
    assert len({entry["name"] for entry in listed}) == len({entry["file"] for entry in listed}) == len(listed)
    for entry in entries.values():
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*", entry.name)
        assert re.fullmatch(r"\w[\w.+-]*\.gguf", entry.file)
        assert re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
        assert entry.size > 0
        assert entry.sources
        for source in entry.sources:
            fields = {"hub": {"kind", "repo", "file", "revision"}, "pypi": {"kind", "parts"}}[source["kind"]]
            assert set(source) == fields
            assert all(set(part) == {"package", "version", "member"} for part in source.get("parts", []))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"models": [{"name": "x"}]}'])
def test_a_damaged_registry_is_one_clear_line(registry, tmp_path, text):
    (tmp_path / "registry.json").write_text(text)
    with pytest.raises(ModelError, match=r"can't read the model registry .*; reinstall racer-local") as caught:
        models.load_registry()
    assert "\n" not in str(caught.value)


# find


def test_find_knows_names_and_paths_and_says_how_to_get_a_model_that_is_not_there_or_damaged(registry, home):
    with pytest.raises(ModelError, match="not fetched yet; run: racer-local models fetch tiny"):
        models.find("tiny")
    (home / "m.gguf").write_bytes(BODY[:-1])
    with pytest.raises(ModelError, match="damaged"):
        models.find("tiny")
    (home / "m.gguf").write_bytes(BODY)
    assert models.find("tiny") == models.find(home / "m.gguf") == home / "m.gguf"


@pytest.mark.parametrize(
    ("text", "word"),
    [("x" * 5000, "known names: tiny"), ("a/b", "no such file"), ("b.gguf", "no such file"), ("/", "is a folder")],
)
def test_find_explains_what_it_does_not_find(registry, text, word):
    with pytest.raises(ModelError, match=word):
        models.find(text)


def test_too_little_room_is_told_before_a_byte_is_written(registry, server, home, monkeypatch):
    server.pages[HUB_PATH] = Page(BODY)
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(DownloadError, match=r"102 kB more are needed in .* but 1 kB are free; make room"):
        models.fetch("tiny")
    assert local_server.left_over(home) == []


def test_a_folder_that_cannot_be_written_is_told_in_one_line(registry, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RACER_LOCAL_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="set RACER_LOCAL_HOME"):
        models.fetch("tiny")


def test_two_processes_that_fetch_the_same_model_download_it_once(registry, server, tmp_path):
    server.pages[HUB_PATH] = Page(BODY, wait_s=0.5)
    code = (
        "import sys, pathlib; from racer_local.models import fetch, registry, Progress\n"
        "class Loud(Progress): note = lambda self, text: print(text)\n"
        "registry.registry_path = lambda: pathlib.Path(sys.argv[1])\n"
        "print(fetch('tiny', Loud()))"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "registry.json")]
    children = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outs = [child.communicate(timeout=30)[0].splitlines() for child in children]
    assert [out[-1] for out in outs] == [str(models.find("tiny"))] * 2
    assert sum("another process is fetching tiny; waiting for it" in out for out in outs) == 1
    assert models.find("tiny").read_bytes() == BODY
    assert len(server.seen) == 1


def run(*words):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["models", *words])
    return args.run(args)


def test_list_and_path_show_each_model_and_whether_it_is_here(registry, home, capsys):
    assert run("list") == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "SIZE", "LICENCE", "STATE", "DESCRIPTION"]
    assert row == "tiny  102 kB  Apache-2.0  not fetched  a test"
    (home / "m.gguf").write_bytes(BODY)
    run("list", "--json")
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["name"], record["fetched"], record["path"]) == ("tiny", True, str(home / "m.gguf"))
    run("path", "tiny")
    assert capsys.readouterr() == (f"{home / 'm.gguf'}\n", "")


def test_fetch_prints_the_path_on_stdout_and_ten_lines_of_progress_elsewhere(registry, server, capsys, monkeypatch):
    monkeypatch.setattr(download, "CHUNK", 1024)
    server.pages[HUB_PATH] = Page(BODY)
    assert run("fetch", "tiny") == 0
    out, err = capsys.readouterr()
    assert out == f"{models.find('tiny')}\n"
    lines = err.splitlines()
    assert lines[0] == "tiny: 102 kB, licence: Apache-2.0 (https://example.org)"
    assert len([line for line in lines if "%" in line]) == 10
    assert "100%" in lines[-1]
    assert "\r" not in err


def test_on_a_terminal_the_progress_stays_on_one_line(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(command.time, "monotonic", lambda: float(next(clock)))
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
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
