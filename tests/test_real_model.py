"""SmolLM2-135M-Instruct Q4_1: the laws on a model that speaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from racer_local import cli, racing
from racer_local.config import ContextConfig, DraftConfig, SamplingConfig
from racer_local.cost import VerifyCost
from racer_local.llama import render_chat
from racer_local.session import Session, first_difference

pytestmark = pytest.mark.model

PROMPTS = [
    "Write a Python function that returns the n-th Fibonacci number, and explain it line by line.",
    "serving " * 48,
    "Give me a table of the planets with their number of moons, in JSON.",
    "Translate into French: The quick brown fox jumps over the lazy dog.",
]
DEMO = Path(__file__).parent.parent / "examples" / "rewrite.txt"
EXACT = {"flash_attn": "on", "kv_type": "bf16"}
TOKENS = 64


def answer(model, text, draft, sampling=None, max_tokens=TOKENS, exact=False, **context):
    prompt = render_chat(model, [{"role": "user", "content": text}])
    with Session(model, ContextConfig(n_ctx=1024, **context), DraftConfig(draft=draft, exact=exact)) as session:
        return session.answer(prompt, sampling=sampling, max_tokens=max_tokens, record=True)


def test_the_demo_gives_the_ids_of_plain_decoding(smollm2, monkeypatch):
    """With a curve that is given: one measured on a busy machine may say that no draft pays."""
    monkeypatch.setattr(racing, "recall", lambda facts: VerifyCost.parse("cpu"))
    text = DEMO.read_text(encoding="utf-8")
    plain = answer(smollm2, text, "none", max_tokens=200, exact=True)
    for draft in ("racer", "lookup"):
        drafted = answer(smollm2, text, draft, max_tokens=200, exact=True)
        assert drafted.token_ids == plain.token_ids
        assert (drafted.stats.exact, drafted.stats.row_limit > 1) == (True, True)
        assert drafted.stats.mean_accepted_tokens > 2


@pytest.mark.parametrize("text", PROMPTS, ids=["code", "repetition", "json", "translation"])
def test_greedy_ids_are_those_of_plain_decoding_in_exact_settings(smollm2, text):
    plain = answer(smollm2, text, "none", **EXACT)
    for draft in ("paper", "racer", "lookup"):
        drafted = answer(smollm2, text, draft, **EXACT)
        assert drafted.token_ids == plain.token_ids
        assert drafted.text == plain.text
        assert drafted.stats.finish_reason == plain.stats.finish_reason


@pytest.mark.parametrize("text", PROMPTS, ids=["code", "repetition", "json", "translation"])
def test_with_the_fast_default_a_first_difference_is_at_a_near_tie(smollm2, text):
    plain = answer(smollm2, text, "none")
    for draft in ("racer", "lookup"):
        difference = first_difference(plain, answer(smollm2, text, draft))
        assert difference is None or difference.gap < 0.5


def test_every_emitted_token_is_the_argmax_of_its_verify_forward(smollm2):
    drafted = answer(smollm2, PROMPTS[1], "racer")
    for token, near in drafted.drawn:
        assert near[token] == max(near.values())


def test_a_seed_gives_the_same_ids_drafted_or_not(smollm2):
    sampling = SamplingConfig(temperature=0.8, seed=42)
    plain = answer(smollm2, PROMPTS[0], "none", sampling, **EXACT)
    assert answer(smollm2, PROMPTS[0], "racer", sampling, **EXACT).token_ids == plain.token_ids
    other = SamplingConfig(temperature=0.8, seed=43)
    assert answer(smollm2, PROMPTS[0], "none", other, **EXACT).token_ids != plain.token_ids


def test_three_turns_of_a_chat_equal_a_fresh_session(smollm2):
    messages, context = [], ContextConfig(n_ctx=1024, **EXACT)
    with Session(smollm2, context, DraftConfig(draft="racer")) as chat:
        for turn in ("My name is Ada.", "What is my name?", "Spell it backwards."):
            messages.append({"role": "user", "content": turn})
            prompt = render_chat(smollm2, messages)
            said = chat.answer(prompt, max_tokens=40)
            with Session(smollm2, context, DraftConfig(draft="none")) as fresh:
                assert said.token_ids == fresh.answer(prompt, max_tokens=40).token_ids
            messages.append({"role": "assistant", "content": said.text})
    assert said.stats.cached_tokens > 60


def test_the_demo_prompt_accepts_what_it_can_reuse(smollm2):
    drafted = answer(smollm2, DEMO.read_text(encoding="utf-8"), "racer", max_tokens=200)
    assert drafted.stats.mean_accepted_tokens > 2
    assert drafted.stats.accepted_by_source["context"] > drafted.stats.accepted_by_source["logits"]


def test_generate_answers_by_registry_name(smollm2_path, capsys):
    code = cli.main(
        ["generate", "-m", "smollm2-135m", "-p", "Say hello.", "--max-tokens", "20", "--json", "--draft", "racer"]
    )
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert shown["completion_tokens"] == len(shown["token_ids"]) > 0
