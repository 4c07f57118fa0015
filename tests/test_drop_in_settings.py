"""racer_local.Llama: the settings of a call, and what is refused before it reaches C."""

from __future__ import annotations

from contextlib import closing

import llamas
import pytest
from llamas import BATCH_EQUALS_SINGLE, EXACT, PROMPT, held_by, opened, piece, text_of
from tiny_gguf import BOS

from racer_local import ConfigError, ContextFullError, DraftConfig, ExactnessError
from racer_local.config import default_threads

exact = llamas.exact

# --- a call's own settings ---


def test_a_call_can_draft_less_or_nothing_and_says_the_same(exact):
    prompt, asked = exact.tokenize(PROMPT.encode()), {"max_tokens": 40, "temperature": 0.0}
    texts = []
    for racer, most in (
        (None, 15),
        (True, 15),
        ({"max_nodes": 4}, 3),
        ({"draft": "lookup", "max_nodes": 6}, 5),
        (DraftConfig(**{**EXACT, "max_nodes": 2}), 1),
        (False, 0),
        ({"draft": "none"}, 0),
        ({"max_nodes": 1}, 0),
    ):
        texts.append(text_of(exact.create_completion(prompt, **asked, racer=racer)))
        stats = exact.last_stats
        assert (stats["accepted"] > 0) == (most > 0), racer
        assert stats["drafted"] <= most * stats["steps"]
        assert stats["exact"]
    assert len(set(texts)) == 1
    assert exact.create_completion(prompt, **asked, racer=None)
    assert exact.last_stats["drafted"] > 0


def test_a_call_can_ask_for_exact_drafts_where_the_settings_allow_it(tiny_path, exact):
    asked = {"max_tokens": 40, "temperature": 0.0}
    with closing(opened(tiny_path, {**EXACT, "exact": False}, **BATCH_EQUALS_SINGLE)) as llm:
        drafted = text_of(llm(PROMPT, **asked, racer={"exact": True}))
        assert llm.last_stats["exact"]
        assert llm.last_stats["accepted"] > 0
        assert drafted == text_of(exact(PROMPT, **asked))
        llm(PROMPT, **asked)
        assert not llm.last_stats["exact"]


CALLS = {
    "call": lambda llm, **asked: llm("x", **asked),
    "completion": lambda llm, **asked: llm.create_completion("x", **asked),
    "stream": lambda llm, **asked: llm.create_completion("x", stream=True, **asked),
    "chat": lambda llm, **asked: llm.create_chat_completion([{"role": "user", "content": "x"}], **asked),
    "chat stream": lambda llm, **asked: llm.create_chat_completion(
        [{"role": "user", "content": "x"}], stream=True, **asked
    ),
    "generate": lambda llm, **asked: llm.generate([BOS], **asked),
}
BAD = [
    ({"racer": {"nodes": 3}}, "no setting 'nodes'.*known: draft, max_nodes, exact"),
    ({"racer": {"max_nodes": "4"}}, "max_nodes is '4'"),
    ({"racer": {"max_nodes": 0}}, "from 1 to"),
    ({"racer": {"exact": 1}}, "exact is 1.*bool"),
    ({"racer": {"draft": "best"}}, "must be one of"),
    ({"racer": "fast"}, "'fast'"),
    ({"racer": 3}, "racer is 3"),
    ({"corpora": ["x"]}, "the paper drafter reads no indexes"),
    ({"corpora": "x"}, "corpora is 'x'"),
    ({"corpora": [3]}, "corpora .*must be the path"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_a_wrong_setting_is_refused_in_one_line(tiny_path, exact, bad, message):
    with pytest.raises(ConfigError, match=message) as error:
        opened(tiny_path, **bad)
    assert "\n" not in str(error.value)
    for call in CALLS.values():
        with pytest.raises(ConfigError, match=message) as error:
            call(exact, **bad)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("opened_as", "racer", "message"),
    [
        (EXACT, {"breadth": 3}, "no setting 'breadth' while it is open; known: draft, max_nodes, exact"),
        (EXACT, {"max_nodes": 17}, "opened for 16"),
        (EXACT, DraftConfig(breadth=3), "only draft, max_nodes, exact"),
        (False, {"draft": "paper"}, "open it with racer=True"),
    ],
)
def test_what_only_an_opening_can_set_is_refused_at_a_call(tiny_path, opened_as, racer, message):
    with closing(opened(tiny_path, opened_as)) as llm:
        for call in CALLS.values():
            with pytest.raises(ConfigError, match=message):
                call(llm, racer=racer)


def test_a_setting_of_a_call_holds_for_all_of_a_stream_and_for_no_other_call(exact):
    for kind, call in CALLS.items():
        answer = call(exact, **({} if kind == "generate" else {"max_tokens": 20}), racer=False)
        if not isinstance(answer, dict):
            first = next(answer)
            assert first
            list(answer)
        assert exact.last_stats["drafted"] == 0, kind
        assert exact.last_stats["draft"] == "none"
    one = exact.create_completion(PROMPT, max_tokens=40, temperature=0.0, stream=True, racer=False)
    next(one)
    one.close()
    exact(PROMPT, max_tokens=40, temperature=0.0)
    assert exact.last_stats["drafted"] > 0


def test_a_setting_of_a_chat_holds_for_what_its_handler_completes_later(exact, monkeypatch):
    def handler(llama, messages, **_):
        for message in messages:
            yield llama.create_completion(message["content"], max_tokens=30, temperature=0.0)

    monkeypatch.setattr(exact, "chat_handler", handler)
    messages = [{"role": "user", "content": PROMPT}] * 3
    with pytest.raises(ConfigError, match="known"):
        exact.create_chat_completion(messages, racer={"nodes": 3})
    for racer, most in ((False, 0), ({"max_nodes": 3}, 2), (None, 15)):
        for answer in exact.create_chat_completion(messages, racer=racer):
            stats = exact.last_stats
            assert answer["usage"]["completion_tokens"] == stats["emitted"] == 30
            assert (stats["drafted"] > 0) == (most > 0)
            assert stats["drafted"] <= most * stats["steps"]
            exact(PROMPT, max_tokens=30, temperature=0.0)
            assert exact.last_stats["drafted"] > 2 * exact.last_stats["steps"]


@pytest.mark.model
def test_settings_that_exact_drafts_cannot_have_are_named(smollm2_path):
    racer = {"draft": "lookup", "max_nodes": 4}
    with pytest.raises(ExactnessError, match="flash_attn=False"):
        opened(smollm2_path, {**racer, "exact": True}, flash_attn=False)
    with closing(opened(smollm2_path, racer)) as llm:
        for call in (llm, llm.create_completion):
            with pytest.raises(ExactnessError, match=r"flash_attn=False and type_k=1 \(f16\)"):
                call("x", max_tokens=2, racer={"exact": True})
        assert text_of(llm("The capital of France is", max_tokens=1, temperature=0.0)) == " Paris"


# --- what is checked before it reaches C ---


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("n_batch", value) for value in (0, -1, True, "512", 512.0, None, 2**31)],
        *[("n_ubatch", value) for value in (0, -4, False, "64")],
        *[("n_ctx", value) for value in (-5, True, "256", 2**31)],
        *[(name, value) for name in ("n_threads", "n_threads_batch") for value in (-1, 513, "2", True, 1.5)],
    ],
)
def test_a_size_that_would_end_the_process_is_refused_by_name(tiny_path, name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value!r}"):
        opened(tiny_path, **{name: value})


def test_sizes_that_are_left_open_get_a_default(tiny_path):
    with closing(opened(tiny_path, False, n_threads=0, n_threads_batch=0, n_ctx=0)) as llm:
        assert llm.n_threads == llm.context_params.n_threads == default_threads()
        assert llm.n_threads_batch == llm.context_params.n_threads_batch == default_threads()
        assert llm.n_ctx() == 4096
    with closing(opened(tiny_path, False, n_threads=3, n_threads_batch=None)) as llm:
        assert (llm.n_threads, llm.n_threads_batch) == (3, max(3, default_threads()))


@pytest.mark.parametrize("length", [256, 257, 300, 5000])
def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(tiny_path, length):
    with closing(opened(tiny_path)) as llm:
        before, prompt = text_of(llm(PROMPT, max_tokens=5, temperature=0.0)), [BOS, *piece("a" * 5000)][:length]
        held = held_by(llm)
        completions = (
            lambda: llm.create_completion(prompt),
            lambda: list(llm.create_completion(prompt, stream=True)),
            lambda: llm.create_completion(prompt, echo=True, logprobs=1),
            lambda: llm.create_chat_completion([{"role": "user", "content": "\n" * length}]),
        )
        for call in (*completions, lambda: list(llm.generate(prompt))):
            wording = r"Requested tokens \(\d+\) exceed context window of 256" if call in completions else r"\d+.* 256"
            with pytest.raises(ContextFullError, match=wording) as error:
                call()
            assert isinstance(error.value, ValueError)
            assert str(length) in str(error.value) or call is completions[-1]
            assert held_by(llm) == held
        if length > 256:
            llm.reset()
            with pytest.raises(ContextFullError, match=f"{length}.*256"):
                llm.eval(prompt)
        assert text_of(llm(PROMPT, max_tokens=5, temperature=0.0)) == before
