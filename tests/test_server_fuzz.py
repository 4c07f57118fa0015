"""Requests made from the server's own description, and against it: none is answered with a 500."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode
from serving import serve

CASES = 2000
COMPLETIONS = ("/v1/chat/completions", "/v1/completions")
"""What most of the cases are for."""
STATUSES = {200, 201, 400, 403, 404, 405, 413, 422}


@pytest.fixture(scope="module")
def server(tiny_path, tmp_path_factory):
    flags = ("--ctx", 256, "--limit-tokens", 16, "--max-n", 2, "--folder", tmp_path_factory.mktemp("allowed"))
    with serve(tiny_path, *flags) as serving:
        yield serving


def operations(server):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    return {
        f"{each.method.upper()} {each.path}": each for result in schema.get_all_operations() for each in [result.ok()]
    }


def mend(body, model):
    """What the description can't say; else most requests would end at the door."""
    if body.get("model"):
        body["model"] = model
    for message in body.get("messages") or []:
        if message.get("role") != "assistant":
            message.pop("tool_calls", None)
        if message.get("content") is None and not message.get("tool_calls"):
            message["content"] = "x"
    for token in [token for token in body.get("logit_bias") or {} if not (token.isascii() and token.isdecimal())]:
        del body["logit_bias"][token]


def test_no_case_of_two_thousand_is_a_server_error(server):
    seen, paths = Counter(), Counter()
    name = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]

    def try_out(operation, mode, cases):
        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=cases,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def attempt(case):
            if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
                mend(case.body, name)
            response = case.call(timeout=60)
            seen[response.status_code] += 1
            paths[operation.path] += 1
            assert response.status_code in STATUSES, (case.as_curl_command(), response.text)
            if response.status_code >= 400 and response.request.method != "HEAD":
                error = response.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert error["message"].strip()
                assert "\n" not in error["message"]

        attempt()

    known = operations(server)
    assert {operation.path for operation in known.values()} >= {
        *COMPLETIONS,
        "/v1/embeddings",
        "/v1/corpora",
        "/tokenize",
    }
    for operation in known.values():
        for mode in GenerationMode:
            with suppress(Unsatisfiable):  # nothing can be wrong with a request without a parameter
                try_out(operation, mode, 450 if operation.path in COMPLETIONS else 60)
    assert sum(seen.values()) >= CASES, (seen, paths)
    assert seen[200] > 250, seen  # a good part gets through to the model
    assert seen[422] > 400, seen
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert not any("failed" in line or "Traceback" in line for line in server.lines), server.lines[-20:]
