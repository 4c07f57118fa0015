"""The `openai` client against the server, with SmolLM2."""

from __future__ import annotations

import json
import time

import httpx
import openai
import pytest
from pydantic import BaseModel
from serving import serve

from racer_local.config import ContextConfig, DraftConfig
from racer_local.llama import Model
from racer_local.session import Session

pytestmark = pytest.mark.model
MODEL = "smollm2-135m"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
        },
    },
}


@pytest.fixture(scope="module")
def server(smollm2_path):
    with serve(f"{MODEL}={smollm2_path}", "--ctx", 2048, "--exact", "--api-key", "a-key-for-tests") as serving:
        yield serving


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="a-key-for-tests", max_retries=0) as client:
        yield client


def user(text):
    return [{"role": "user", "content": text}]


def test_chat_answers_what_a_session_answers(client, smollm2_path):
    asked = user("What is the capital of France?")
    answer = client.chat.completions.create(model=MODEL, messages=asked, max_tokens=40)
    context, plain = ContextConfig(n_ctx=2048, threads=1), DraftConfig(draft="none", exact=True)
    with Model(smollm2_path) as model, Session(model, context, plain) as session:
        own = session.answer(asked, max_tokens=40)
    assert answer.choices[0].message.content == own.text
    assert answer.usage.completion_tokens == own.stats.emitted
    assert answer.model_extra["racer"]["draft"] == "racer"


def test_a_stream_joins_to_the_whole_answer(client):
    asked = {"model": MODEL, "messages": user("Count from one to five."), "max_tokens": 30}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_can_be_demanded_and_its_result_given_back(client, choice):
    messages = user("What is the weather in Paris, in Celsius?")
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], tool_choice=choice)
    call = answer.choices[0].message.tool_calls[0]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"city": "Paris", "unit": "C"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"}
    messages += [answer.choices[0].message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], max_tokens=60)
    assert answer.choices[0].message.content


def test_tools_that_are_offered_may_be_left_alone(client):
    with client.chat.completions.stream(
        model=MODEL, messages=user("Say hello."), tools=[WEATHER], max_tokens=40
    ) as stream:
        answer = stream.get_final_completion()
    message = answer.choices[0].message
    assert message.content or message.tool_calls


class Person(BaseModel):
    name: str
    age: int


def test_a_json_schema_is_kept_to(client):
    answer = client.chat.completions.parse(
        model=MODEL, messages=user("Tom is 31 years old. Who is it?"), response_format=Person, max_tokens=60
    )
    assert answer.choices[0].message.parsed == Person(name="Tom", age=31)
    any_object = client.chat.completions.create(
        model=MODEL, messages=user("Tom is 31. As JSON?"), response_format={"type": "json_object"}, max_tokens=120
    )
    if any_object.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(any_object.choices[0].message.content), dict)


def test_log_probabilities_come_for_each_token(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=user("Say hello."), max_tokens=8, logprobs=True, top_logprobs=4
    )
    told = answer.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in told).decode() == answer.choices[0].message.content
    assert len(told) == answer.usage.completion_tokens
    for token in told:
        assert [near.logprob for near in token.top_logprobs] == sorted(
            (n.logprob for n in token.top_logprobs), reverse=True
        )
        assert token.top_logprobs[0].token == token.token  # greedy
        assert token.logprob < 0


def test_a_legacy_completion_and_its_stop(client):
    answer = client.completions.create(model=MODEL, prompt="one, two, three, four,", max_tokens=20, stop=["seven"])
    assert answer.choices[0].text.strip().startswith("five, six")
    assert "seven" not in answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"


def test_closing_a_stream_stops_the_work(client, server):
    def cancelled():
        text = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer a-key-for-tests"}).text
        return float(
            next(line for line in text.splitlines() if line.startswith("racer_cancelled_requests_total")).split()[1]
        )

    before = cancelled()
    stream = client.chat.completions.create(
        model=MODEL, messages=user("Write a long story."), max_tokens=1500, stream=True, logit_bias={"2": -100}
    )
    next(iter(stream))
    stream.close()
    started = time.monotonic()
    client.chat.completions.create(model=MODEL, messages=user("Hi."), max_tokens=1)
    assert time.monotonic() - started < 5  # 1,500 tokens take far longer
    assert cancelled() == before + 1


def test_closing_while_the_prompt_is_read_stops_the_work(client, server):
    long = user("The quick brown fox jumps over the lazy dog. " * 150)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.4).chat.completions.create(model=MODEL, messages=long)
    started = time.monotonic()
    client.chat.completions.create(model=MODEL, messages=user("Hi."), max_tokens=1)
    soon = time.monotonic() - started
    started = time.monotonic()
    client.chat.completions.create(model=MODEL, messages=long, max_tokens=1)
    assert soon < time.monotonic() - started


def test_errors_are_the_clients_own(client, server):
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.chat.completions.create(model="gpt-4", messages=user("x"))
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=user("word " * 3000))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.UnprocessableEntityError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=user("x"), temperature=-1)
    wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="another-key", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError, match="not known"):
        wrong.models.list()
    assert [model.id for model in client.models.list()] == [MODEL]
