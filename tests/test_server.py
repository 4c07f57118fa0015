"""The server as its own process, with a model of random weights."""

from __future__ import annotations

import base64
import json
import time

import httpx
import numpy as np
import pytest
from serving import CHAT, ask, serve, stream, user
from tiny_gguf import write_tiny_gguf

KEYS = "first-key-1", "second-key-2"
TOOL = {"type": "function", "function": {"name": "one"}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("allowed")
    (folder / "notes.txt").write_text("one two three four five\n" * 40)
    (folder / "way-out.txt").symlink_to("/etc/hostname")
    return folder


@pytest.fixture(scope="module")
def embedding_path(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "embed.gguf", n_layer=1, pooling=1)


@pytest.fixture(scope="module")
def server(tiny_path, corpus, embedding_path):
    flags = ("--ctx", 2048, "--folder", corpus, "--max-body", "100K", "--limit-tokens", 300, "--max-n", 6)
    with serve(tiny_path, "-m", f"vectors={embedding_path}", *flags) as serving:
        yield serving


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


# --- completions ---


@pytest.mark.parametrize("more", [{}, {"n": 3, "temperature": 1.0, "seed": 5}, {"stop": [" "]}, {"max_tokens": 1}])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_stream_says_what_the_whole_answer_says(client, path, more):
    more = {"max_tokens": 40, **more} if path == CHAT else {"max_tokens": 40, "prompt": ["one two", "x y"], **more}
    whole = ask(client, path, **more).json()
    chunks = stream(client, path, **more, stream_options={"include_usage": True})
    texts, reasons = {}, {}
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            text = choice["delta"].get("content", "") if path == CHAT else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            reasons[choice["index"]] = choice["finish_reason"] or reasons.get(choice["index"])
    for choice in whole["choices"]:
        assert texts[choice["index"]] == (choice["message"]["content"] if path == CHAT else choice["text"])
        assert reasons[choice["index"]] == choice["finish_reason"]
    assert len(texts) == len(whole["choices"]) == more.get("n", 1) * (1 if path == CHAT else 2)
    last = chunks[-1]
    assert last["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]
    assert last["racer"]["steps"] > 0


def test_statistics_come_with_every_answer_and_no_chunk_is_without_a_choice_unless_asked(client):
    whole = ask(client, max_tokens=30).json()
    assert whole["racer"]["draft"] == "racer"
    assert whole["racer"]["plain_tokens_per_second"] > 0
    chunks = stream(client, max_tokens=30)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert "racer" in chunks[-1]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


def test_the_sources_of_a_stream_join_to_its_text_and_end_its_steps(client):
    chunks = stream(client, max_tokens=60, racer={"draft": "paper", "sources": True})
    told = [each for chunk in chunks for each in chunk.get("racer", {}).get("sources", [])]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert "".join(piece for piece, _ in told) == text
    whole = ask(client, max_tokens=60, racer={"draft": "paper", "sources": True}).json()
    assert "".join(piece for piece, _ in whole["racer"]["sources"][0]) == whole["choices"][0]["message"]["content"]
    stats = chunks[-1]["racer"]
    assert {source for _, source in told} <= {None, "context", "logits", "corpus"}
    assert any(source for _, source in told)
    assert sum(source is None for _, source in told) in (stats["steps"], stats["steps"] - 1)


def test_drafts_change_no_answer(server, client):
    plain = ask(client, max_tokens=80, racer=False).json()
    for racer in (True, {"draft": "paper"}, {"draft": "lookup", "max_nodes": 4}, {"draft": "logits"}):
        answer = ask(client, max_tokens=80, racer=racer).json()
        assert answer["choices"] == plain["choices"]
    assert plain["racer"]["draft"] == "none"
    assert plain["racer"]["mean_accepted_tokens"] == 1.0


def test_a_seed_repeats_an_answer_and_none_gives_another_one(client):
    def text(**more):
        return ask(client, max_tokens=30, temperature=2.0, top_p=1.0, min_p=0.0, **more).json()["choices"][0]["message"]

    assert text(seed=3) == text(seed=3) != text(seed=4)
    assert text() != text()


def test_log_probabilities_are_those_of_plain_decoding(client):
    def told(**more):
        answer = ask(client, max_tokens=25, logprobs=True, top_logprobs=3, **more).json()
        return answer["choices"][0]["logprobs"]["content"]

    ours, plain = told(racer={"draft": "paper"}), told(racer=False)
    assert [each["token"] for each in ours] == [each["token"] for each in plain]
    assert np.allclose([t["logprob"] for t in ours], [t["logprob"] for t in plain], atol=1e-3)
    assert all(each["top_logprobs"][0]["logprob"] == each["logprob"] for each in plain)  # greedy
    streamed = stream(client, max_tokens=25, logprobs=True, top_logprobs=3, racer=False)
    joined = [t for chunk in streamed for t in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert joined == plain


def test_legacy_log_probabilities_and_echo(client):
    answer = ask(client, "/v1/completions", prompt="one two", max_tokens=6, logprobs=2).json()["choices"][0]
    told = answer["logprobs"]
    assert "".join(told["tokens"]) == answer["text"]
    assert told["text_offset"][0] == 0
    assert len(told["top_logprobs"][0]) >= 2
    echoed = ask(client, "/v1/completions", prompt="one two", max_tokens=6, echo=True).json()["choices"][0]["text"]
    assert echoed == f"one two{answer['text']}"


def test_usage_counts_each_prompt_once_and_every_answer(client):
    one = ask(client, max_tokens=5, temperature=1.0).json()["usage"]
    three = ask(client, max_tokens=5, temperature=1.0, n=3).json()["usage"]
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["total_tokens"] == three["prompt_tokens"] + three["completion_tokens"]
    assert ask(client, max_tokens=0).json()["usage"]["prompt_tokens"] == one["prompt_tokens"]
    again = ask(client, max_tokens=5).json()["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1


def test_a_schema_and_a_forced_call_are_kept_to_by_any_model(client):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = ask(client, response_format=form, temperature=1.0, seed=1).json()["choices"][0]
    if answer["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["message"]["content"])["n"], int)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
        for name in ("one", "two")
    ]
    for choice, names in (("required", ("one", "two")), ({"type": "function", "function": {"name": "two"}}, ("two",))):
        answer = ask(client, tools=tools, tool_choice=choice).json()["choices"][0]
        assert answer["finish_reason"] == "tool_calls"
        assert answer["message"]["tool_calls"][0]["function"]["name"] in names
        chunks = stream(client, tools=tools, tool_choice=choice)
        assert (
            next(chunk for chunk in chunks if chunk["choices"][0]["delta"])["choices"][0]["delta"]["role"]
            == "assistant"
        )
        calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
        assert calls[0]["function"] == answer["message"]["tool_calls"][0]["function"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


# --- what is refused ---


@pytest.mark.parametrize(
    ("status", "message", "body"),
    [
        (422, "temprature: there is no such field", {"temprature": 1}),
        (422, "racer.remember: there is no such field", {"racer": {"remember": "/tmp/x"}}),
        (422, "messages", {"messages": []}),
        (422, "text as its content", {"messages": [{"role": "user"}]}),
        (422, "tool_choice needs tools", {"tools": [], "tool_choice": "required"}),
        (
            422,
            "tool_choice names 'x'",
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        ),
        (422, "each tool needs a name of its own", {"tools": [TOOL, TOOL]}),
        (422, "temperature", {"temperature": -1}),
        (422, "no token id", {"logit_bias": {"x": 1}}),
        (422, "top_logprobs needs", {"top_logprobs": 2}),
        (422, "stream_options needs", {"stream_options": {"include_usage": True}}),
        (404, "there is no model 'gpt-4'", {"model": "gpt-4"}),
        (404, "there is no corpus '../x'", {"racer": {"corpora": ["../x"]}}),
        (422, "text as its content", {"messages": [{"role": "user", "content": None}]}),
        (400, "n is 7; this server gives up to 6 (--max-n)", {"n": 7}),
        (400, "max_tokens is 301; this server allows up to 300", {"max_tokens": 301}),
        (400, "max_nodes is 200 and this was opened for 64", {"racer": {"max_nodes": 200}}),
        (400, "not in the vocabulary", {"logit_bias": {"99999": 1}}),
        (
            400,
            "maxLength is",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"maxLength": 1e9}}}},
        ),
        (400, "is a model for embeddings", {"model": "vectors"}),
    ],
)
def test_bad_input_is_one_clear_line_in_the_shape_of_openai(client, status, message, body):
    response = ask(client, **body)
    error = response.json()["error"]
    assert (response.status_code, message in error["message"]) == (status, True), error
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]


def test_the_prompts_of_a_completion_count_too(client):
    response = ask(client, "/v1/completions", prompt=["a"] * 3, n=3, max_tokens=1)
    assert response.status_code == 400
    assert "9 answers are asked for (prompts times n); this server gives up to 6" in response.json()["error"]["message"]


def test_a_full_context_says_the_numbers(client):
    response = ask(client, messages=user("one two " * 1200))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "the context holds 2048" in error["message"]
    response = client.post(CHAT, json={"stream": True, "messages": user("one two " * 1200)})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nope", 404), ("GET", CHAT, 405), ("POST", "/health", 405)]
)
def test_a_wrong_address_is_answered_in_the_same_shape(client, method, path, status):
    response = client.request(method, path)
    assert response.status_code == status
    assert "error" in response.json()


def test_a_body_that_is_too_large_or_no_json_is_refused(client, server):
    assert client.post(CHAT, content=b"x" * 110_000).status_code == 413
    assert client.post(CHAT, content=iter([b"x" * 60_000] * 2)).status_code == 413  # without a length
    broken = client.post(CHAT, content=b'{"messages": ', headers={"Content-Type": "application/json"})
    assert (broken.status_code, "no JSON" in broken.json()["error"]["message"]) == (422, True)
    plain = client.post(CHAT, content=b'{"messages": []}', headers={"Content-Type": "text/plain"})
    assert "Content-Type: application/json" in plain.json()["error"]["message"]


def test_other_pages_and_other_names_may_not_use_a_server_without_a_key(client, server):
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        assert client.get("/v1/models", headers=headers).status_code == 403
    for headers in ({"Origin": "http://["}, {"Host": "["}, {"Origin": "null"}):
        assert client.get("/v1/models", headers=headers).status_code == 403
    assert client.get("/v1/models", headers={"Origin": server.url}).status_code == 200
    assert "access-control-allow-origin" not in client.get("/v1/models").headers


# --- the rest ---


def test_models_are_listed_and_named_one_by_one(client, tiny_path):
    listed = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == [tiny_path.stem, "vectors"]
    assert client.get(f"/v1/models/{tiny_path.stem}").json()["n_ctx"] == 2048
    assert client.get("/v1/models/other").status_code == 404


def test_embeddings_have_length_one_and_come_as_numbers_or_base64(client):
    texts = ["one two", "seven"]
    listed = ask(client, "/v1/embeddings", model="vectors", input=texts).json()
    vectors = [np.array(each["embedding"], np.float32) for each in listed["data"]]
    assert np.allclose([np.linalg.norm(vector) for vector in vectors], 1)
    assert not np.allclose(*vectors)
    packed = ask(client, "/v1/embeddings", model="vectors", input=texts[0], encoding_format="base64").json()
    assert np.array_equal(np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4"), vectors[0])
    assert packed["usage"]["prompt_tokens"] < listed["usage"]["prompt_tokens"]
    refused = ask(client, "/v1/embeddings", input="x")
    assert (refused.status_code, "does not embed" in refused.json()["error"]["message"]) == (400, True)
    long = ask(client, "/v1/embeddings", model="vectors", input="one two " * 2000)
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_tokens_and_back(client):
    tokens = ask(client, "/tokenize", content="héllo </s>").json()["tokens"]
    assert 2 not in tokens
    assert 2 in ask(client, "/tokenize", content="</s>", parse_special=True).json()["tokens"]
    assert ask(client, "/detokenize", tokens=tokens).json()["content"].strip() == "héllo </s>"
    assert ask(client, "/detokenize", tokens=[999_999]).status_code == 400


def test_a_control_tokens_spelling_in_a_prompt_stays_text_unless_asked(client):
    def count(**more):
        return ask(client, "/v1/completions", prompt="a</s>b", max_tokens=1, **more).json()["usage"]["prompt_tokens"]

    assert count() > count(parse_special=True)


def test_clients_make_use_and_drop_an_index_of_an_allowed_folder(client, corpus):
    assert ask(client, "/v1/corpora", id="notes", path="nothing.txt").status_code in (403, 404)
    assert ask(client, "/v1/corpora", id="notes", path="notes.txt").status_code == 201  # from a named folder on
    made = ask(client, "/v1/corpora", id="notes", path=str(corpus))
    assert made.status_code == 201, made.json()
    assert made.json()["files"] == 1  # no link is followed
    assert [each["id"] for each in client.get("/v1/corpora").json()["data"]] == ["notes"]
    answer = ask(client, racer={"corpora": ["notes"]}, max_tokens=20)
    assert answer.json()["choices"] == ask(client, racer=False, max_tokens=20).json()["choices"]
    for racer in ({"draft": "paper"}, {"draft": "lookup", "corpora": []}, {"draft": "none"}):
        assert ask(client, racer=racer, max_tokens=2).status_code == 200
    assert ask(client, racer={"draft": "paper", "corpora": ["notes"]}).status_code == 400
    assert client.delete("/v1/corpora/notes").json()["deleted"]
    assert client.get("/v1/corpora").json()["data"] == []
    assert client.delete("/v1/corpora/notes").status_code == 404


@pytest.mark.parametrize(
    "path", ["/etc", "/etc/passwd", "{}/../secret", "{}/way-out.txt", "way-out.txt", "~", "", "\0", "../x"]
)
def test_no_path_outside_the_named_folders_is_read(client, corpus, path):
    response = ask(client, "/v1/corpora", id="x", path=path.format(corpus))
    assert response.status_code in (403, 404 if path == "\0" else 422)
    assert client.get("/v1/corpora").json()["data"] == []


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x" * 65, "a\0"])
def test_an_index_is_named_by_a_plain_name(client, corpus, name):
    assert ask(client, "/v1/corpora", id=name, path=str(corpus)).status_code == 422
    assert client.delete(f"/v1/corpora/{name.replace(chr(0), '%00')}").status_code in (404, 405)


def test_the_page_and_its_files_are_served_with_a_strict_policy(client):
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name in ("app.js", "page.css"):
        assert client.get(f"/page/{name}").status_code == 200
    for name in ("../app.py", "%2e%2e/app.py", "..%2fapp.py", "/etc/passwd", ""):
        assert client.get(f"/page/{name}").status_code == 404


def test_metrics_are_prometheus_counters(client):
    before = ask(client, max_tokens=7).json()
    text = client.get("/metrics").text
    assert 'racer_requests_total{route="/v1/chat/completions",status="200"}' in text
    assert f'racer_emitted_tokens_total{{model="{before["model"]}"}}' in text
    client.get("/some/odd/address")
    assert "odd" not in client.get("/metrics").text


# --- clients that go away, and the end ---


def idle(client, seconds=5):
    """How long it takes until nothing runs: a short request waits for what is before it."""
    started = time.monotonic()
    assert ask(client, max_tokens=1).status_code == 200
    return time.monotonic() - started


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_goes_away_stops_its_work(client, server, streaming):
    def running():
        return float(
            next(
                line for line in client.get("/metrics").text.splitlines() if line.startswith("racer_cancelled_req")
            ).split()[1]
        )

    before = running()
    body = {"messages": user(), "max_tokens": 300, "n": 4, "temperature": 1.0, "stream": streaming}
    if streaming:
        with httpx.stream("POST", server.url + CHAT, json=body) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + CHAT, json=body, timeout=0.2)
    idle(client)
    assert running() == before + 1
