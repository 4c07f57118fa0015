"""Many clients at once, a third of whom go away."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
from serving import serve

CLIENTS, REQUESTS, WARM = 16, 200, 50
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "river", "stone", "light", "house", "garden"]
CHAT = "/v1/chat/completions"


def test_of_two_hundred_requests_those_that_are_not_cut_are_answered_as_alone(tiny_path):
    """RACER_LOCAL_LOAD_MODEL runs it with another model."""
    model, rng = os.environ.get("RACER_LOCAL_LOAD_MODEL", tiny_path), random.Random(1)
    bodies = [
        {
            "messages": [{"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randint(2, 40)))}],
            "max_tokens": rng.randint(4, 60),
            "stream": rng.random() < 0.5,
        }
        for _ in range(REQUESTS)
    ]
    cut = set(rng.sample(range(REQUESTS), REQUESTS // 3))
    moments = {number: rng.random() for number in cut}
    done, resident = [], {}
    with serve(model, "--ctx", 1024, "--exact", "--queue", REQUESTS) as serving:
        with httpx.Client(base_url=serving.url, timeout=300) as client:
            alone = {n: text_of(client, {**bodies[n], "racer": False}) for n in range(REQUESTS) if n not in cut}
            threads = serving.threads

            def ask(number):
                if number in cut:
                    leave_early(serving.url, bodies[number], moments[number])
                else:
                    assert text_of(client, bodies[number]) == alone[number], bodies[number]
                done.append(number)
                resident[len(done)] = serving.resident_bytes

            with ThreadPoolExecutor(CLIENTS) as pool:
                list(pool.map(ask, range(REQUESTS)))
            started = time.monotonic()
            text_of(client, {**bodies[0], "max_tokens": 1})
            seconds = time.monotonic() - started
        assert len(done) == REQUESTS
        growth = resident[REQUESTS] / resident[WARM] - 1
        print(f"memory {growth:+.2%}, threads {threads} and {serving.threads}, next request {seconds * 1000:.0f} ms")
        assert abs(growth) < 0.05, resident
        assert serving.threads == threads
        assert seconds < 2
        assert not any("Traceback" in line for line in serving.lines), serving.lines[-20:]
    assert threading.active_count() < CLIENTS


def text_of(client, body):
    if not body["stream"]:
        return client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    with client.stream("POST", CHAT, json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return "".join(json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in lines[:-1])


def leave_early(url, body, moment):
    """A client that goes away while it waits, before the first word or between two."""
    try:
        with (
            httpx.Client(base_url=url, timeout=0.01 + moment) as client,
            client.stream("POST", CHAT, json=body) as response,
        ):
            for number, _ in enumerate(response.iter_lines()):
                if number > 20 * moment:
                    return
    except httpx.TimeoutException:
        pass
