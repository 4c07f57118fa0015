"""How a server begins, whom it lets in, what it keeps in memory, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from serving import CHAT, ask, serve, user
from tiny_gguf import write_tiny_gguf

from racer_local.cli import main

KEYS = "first-key-1", "second-key-2"


def test_many_who_wait_are_told_to_come_again(tiny_path):
    with serve(tiny_path, "--ctx", 4096, "--queue", 1) as serving:
        codes = []

        def work():
            body = {"messages": user(), "max_tokens": 1500, "n": 8, "temperature": 1.0}
            codes.append(httpx.post(serving.url + CHAT, json=body, timeout=120))

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refused = [response for response in codes if response.status_code == 429]
        assert len(refused) >= 3
        assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
        assert any(response.status_code == 200 for response in codes)


def test_a_key_is_needed_but_for_the_page_and_what_one_key_says_is_kept_from_the_other(tiny_path):
    keys = [part for key in KEYS for part in ("--api-key", key)]
    with serve(tiny_path, "--ctx", 512, *keys) as serving, httpx.Client(base_url=serving.url, timeout=60) as client:
        for path in ("/", "/health", "/page/app.js"):
            assert client.get(path).status_code == 200
        for path in ("/v1/models", "/metrics", "/v1/corpora", "/openapi.json", "/nope"):
            assert client.get(path).status_code == 401
        for wrong in ("", "Bearer", "Bearer nope", "Basic first-key-1", f"Bearer {KEYS[0]}x"):
            response = client.post(CHAT, json={"messages": user()}, headers={"Authorization": wrong})
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")

        def steps(key):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"messages": user(), "max_tokens": 80, "racer": {"draft": "paper"}}
            answer = client.post(CHAT, json=body, headers=headers).json()
            return answer["racer"]["steps"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        first, again, other = steps(KEYS[0]), steps(KEYS[0]), steps(KEYS[1])
        assert again[0] < first[0]
        assert again[1] > 0
        assert other == first


def test_models_are_loaded_within_a_limit_of_memory(tiny_path, tmp_path):
    other = write_tiny_gguf(tmp_path / "other.gguf", n_layer=2, seed=1)
    limit = 25_000_000  # one with what it learns; the other one's 19 MB do not fit beside it
    flags = ("-m", other, "--ctx", 256, "--max-ram", limit)
    with serve(tiny_path, *flags) as serving, httpx.Client(base_url=serving.url, timeout=60) as client:
        for name in ("other", tiny_path.stem, "other"):
            assert ask(client, model=name, max_tokens=3).status_code == 200
            loaded = [model["id"] for model in client.get("/v1/models").json()["data"] if model["loaded"]]
            assert loaded == [name]


def test_a_file_that_is_gone_is_said_and_the_others_are_served_on(tiny_path, tmp_path):
    other = write_tiny_gguf(tmp_path / "other.gguf", n_layer=2, seed=1)
    with (
        serve(tiny_path, "-m", other, "--ctx", 256) as serving,
        httpx.Client(base_url=serving.url, timeout=60) as client,
    ):
        other.unlink()
        response = ask(client, model="other")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "model_unavailable")
        assert client.get("/v1/models").status_code == 200
        assert ask(client, max_tokens=3).status_code == 200


LONG = {
    "messages": user(),
    "max_tokens": 3500,
    "temperature": 1.0,
    "seed": 1,
    "racer": False,
    "logit_bias": {"2": -100},
}


def start_long(serving):
    """A request that runs for seconds; what it was answered comes into the list."""
    answers = []

    def work():
        try:
            answers.append(httpx.post(serving.url + CHAT, json=LONG, timeout=60))
        except httpx.HTTPError as error:
            answers.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.5)
    return thread, answers


def test_a_server_told_to_stop_finishes_the_running_answer_and_takes_no_more(tiny_path):
    with serve(tiny_path, "--ctx", 4096, "--grace", 60) as serving:
        thread, answers = start_long(serving)
        serving.stop()
        time.sleep(0.2)
        refused = httpx.post(serving.url + CHAT, json={"messages": user()})
        assert refused.status_code == 503
        assert serving.wait(60) == 0
        thread.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 3500


@pytest.mark.parametrize(("flags", "signals"), [(("--grace", 0.2), 1), (("--grace", 60), 2)])
def test_a_server_whose_time_is_over_or_that_is_told_twice_stops_at_once(tiny_path, flags, signals):
    with serve(tiny_path, "--ctx", 4096, *flags) as serving:
        thread, _ = start_long(serving)
        started = time.monotonic()
        for _ in range(signals):
            serving.stop()
            time.sleep(0.1)
        assert serving.wait(20) == 0
        assert time.monotonic() - started < 2
        thread.join()


@pytest.mark.parametrize("streaming", [True, False])
def test_an_answer_that_the_servers_stop_has_cut_is_no_success(tiny_path, streaming):
    with serve(tiny_path, "--ctx", 4096, "--grace", 0) as serving:
        threading.Timer(0.7, serving.stop).start()
        response = httpx.post(serving.url + CHAT, json={**LONG, "stream": streaming}, timeout=60)
        if streaming:
            *chunks, last = [json.loads(line[6:]) for line in response.text.split("\n\n") if line]
            assert chunks
        else:
            assert response.status_code == 503
            last = response.json()
        assert last["error"]["code"] == "stopping"
        assert serving.wait(20) == 0


def test_a_server_told_to_stop_within_long_work_of_another_kind_ends_well(tiny_path, tmp_path):
    embedding_path = write_tiny_gguf(tmp_path / "embed.gguf", pooling=1)
    with serve(tiny_path, "-m", f"vectors={embedding_path}", "--ctx", 2048, "--grace", 0) as serving:
        threading.Timer(0.7, serving.stop).start()
        body = {"model": "vectors", "input": ["ab " * 600] * 2048}
        response = httpx.post(f"{serving.url}/v1/embeddings", json=body, timeout=60)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "stopping")
        assert serving.wait(20) == 0


def test_a_server_that_is_idle_stops_at_once_at_either_signal(tiny_path):
    for number in (signal.SIGTERM, signal.SIGINT):
        with serve(tiny_path, "--ctx", 256) as serving:
            serving.stop(number)
            assert serving.wait(10) == 0
            assert not any("Traceback" in line for line in serving.lines), serving.lines


def test_while_a_model_loads_it_is_said(tiny_path):
    with serve(tiny_path, "--ctx", 333, ready=False) as serving:  # settings whose costs are not measured yet
        response = httpx.post(serving.url + CHAT, json={"messages": user(), "max_tokens": 1})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
        assert response.headers["retry-after"] == "1"
        assert httpx.get(f"{serving.url}/health").status_code == 503
        serving.wait_until_ready()
        assert httpx.post(serving.url + CHAT, json={"messages": user(), "max_tokens": 1}).status_code == 200


def test_keys_may_come_from_the_environment(tiny_path, monkeypatch):
    seen = []
    monkeypatch.setenv("RACER_LOCAL_API_KEYS", ",".join(KEYS))
    monkeypatch.setattr("racer_local.server.run.serve", lambda paths, config, *rest: seen.append(config) or 0)
    assert main(["serve", "-m", str(tiny_path), "--host", "0.0.0.0", "--api-key", "third-key-3"]) == 0
    assert seen[0].api_keys == ("third-key-3", *KEYS)


def test_an_index_of_the_start_is_read_by_racer_and_left_out_by_the_others(tiny_path, tmp_path):
    index, notes = tmp_path / "own.index", tmp_path / "notes.txt"
    notes.write_text("one two three four five\n" * 40)
    assert main(["index", "build", str(notes), "-o", str(index), "-m", str(tiny_path)]) == 0
    with serve(tiny_path, "--ctx", 256, "--corpus", index) as serving, httpx.Client(base_url=serving.url) as client:
        assert client.get("/v1/corpora").json()["data"][0]["id"] == "own"
        for racer in (True, False, {"draft": "paper"}, {"corpora": ["own"]}, {"corpora": []}):
            assert ask(client, racer=racer, max_tokens=2).status_code == 200
        assert client.delete("/v1/corpora/own").status_code == 403


def failing(*flags, **environment):
    command = [sys.executable, "-m", "racer_local", "serve", *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})
    lines = [line for line in done.stderr.splitlines() if "listening" not in line]
    return done.returncode, lines


def test_what_cannot_be_served_is_one_line_and_an_exit_code(tiny_path, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_path.read_bytes()[:5000])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flags, message in [
            (("-m", tiny_path, "--host", "0.0.0.0"), "give it an --api-key"),
            (("-m", tiny_path, "--port", port), "can't be listened to"),
            (("-m", tiny_path, "-m", tiny_path), "needs a name of its own"),
            (("-m", tmp_path / "missing.gguf"), "no such file"),
            (("-m", broken, "--port", 0), "can't be loaded"),
            (("-m", tiny_path, "--api-key", "short"), "8 or more"),
            (("-m", tiny_path, "--folder", tmp_path / "nowhere"), "is no folder"),
            (("-m", tiny_path, "--max-ram", "lots"), "must be a number of bytes"),
            (("-m", tiny_path, "--corpus", tmp_path / "no.index"), "no.index"),
            (("-m", tiny_path, "--remember", "x", "--api-key", KEYS[0], "--api-key", KEYS[1]), "--remember"),
        ]:
            code, lines = failing(*flags)
            assert code == 2, (flags, lines)
            assert len(lines) == 1, lines
            assert message in lines[0], lines
