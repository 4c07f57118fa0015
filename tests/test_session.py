from __future__ import annotations

import threading

import pytest

from racer_local.config import ContextConfig, DraftConfig, SamplingConfig
from racer_local.errors import ConfigError, ModelError
from racer_local.llama import Model, render_chat
from racer_local.session import Answer, Drawn, Session, first_difference
from racer_local.stats import GenerationStats

EXACT = ContextConfig(n_ctx=256, threads=1, flash_attn="on", kv_type="bf16")


def open_session(model, draft="paper", context=EXACT):
    return Session(model, context, DraftConfig(draft=draft))


def test_text_messages_and_token_ids_are_all_prompts(tiny):
    messages = [{"role": "user", "content": "hello"}]
    with open_session(tiny) as session:
        answers = [session.answer(prompt, max_tokens=12) for prompt in ("hello", messages, render_chat(tiny, messages))]
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
    with pytest.raises(ConfigError, match="prompt is empty"), open_session(tiny) as session:
        session.answer([])


def test_the_context_is_the_models_own_where_none_is_given(tiny):
    with Session(tiny, ContextConfig(threads=1)) as session:
        assert session.target.n_ctx == min(ContextConfig.DEFAULT_CTX, tiny.n_ctx_train)


def test_threads_on_one_session_queue(tiny):
    prompts = ["one two", "three four five", "six", "seven eight"]
    with open_session(tiny) as session:
        alone = {prompt: session.answer(prompt, max_tokens=40).token_ids for prompt in prompts}
        together = {}

        def work(prompt):
            for _ in range(3):
                together.setdefault(prompt, []).append(session.answer(prompt, max_tokens=40).token_ids)

        threads = [threading.Thread(target=work, args=(prompt,)) for prompt in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert together == {prompt: [ids] * 3 for prompt, ids in alone.items()}


def test_closing_from_another_thread_waits_for_the_answer(tiny_path, tiny):
    with open_session(tiny) as other:
        whole = other.answer("hello", max_tokens=100).token_ids
    model = Model(tiny_path)
    session, started, answers = open_session(model), threading.Event(), []
    thread = threading.Thread(
        target=lambda: answers.append(session.answer("hello", max_tokens=100, on_text=lambda _: started.set()))
    )
    thread.start()
    assert started.wait(30)
    model.close()
    thread.join(30)
    assert answers[0].token_ids == whole
    with pytest.raises(ModelError, match="closed"):
        session.answer("hello")


def test_an_answer_within_an_answer_is_refused_and_the_outer_one_can_be_repeated(tiny):
    with open_session(tiny) as session:
        with pytest.raises(RuntimeError, match="an answer is still open"):
            session.answer("hello", max_tokens=20, on_text=lambda _: session.answer("x", max_tokens=2))
        whole = session.answer("hello", max_tokens=20)
    with open_session(tiny, "none") as plain:
        assert whole.token_ids == plain.answer("hello", max_tokens=20).token_ids


def test_an_exception_in_on_text_leaves_the_session_ready(tiny):
    def fail(text):
        raise ValueError("the screen is gone")

    with open_session(tiny) as session, open_session(tiny, "none") as plain:
        with pytest.raises(ValueError, match="the screen is gone"):
            session.answer("hello", max_tokens=20, on_text=fail)
        assert session.answer("hello", max_tokens=20).token_ids == plain.answer("hello", max_tokens=20).token_ids


def test_penalties_and_seeds_give_the_same_ids_drafted_or_not(tiny):
    for sampling in (
        SamplingConfig(repeat_penalty=1.3, frequency_penalty=0.4),
        SamplingConfig(temperature=1.0, seed=3, presence_penalty=0.7, top_k=0, min_p=0.0),
    ):
        with open_session(tiny) as session, open_session(tiny, "none") as plain:
            ours = session.answer("hello", sampling=sampling, max_tokens=80)
            assert ours.token_ids == plain.answer("hello", sampling=sampling, max_tokens=80).token_ids


def test_the_first_difference_is_between_draws_the_end_token_included():
    near = {5: 2.0, 6: 1.75, 2: 1.0}
    plain = Answer(GenerationStats(), drawn=[Drawn(1, {}), Drawn(5, near), Drawn(7, {})])
    same = Answer(GenerationStats(), drawn=[Drawn(1, {}), Drawn(5, near), Drawn(7, {})])
    ended = Answer(GenerationStats(), drawn=[Drawn(1, {}), Drawn(2, near)])
    assert first_difference(plain, same) is None
    difference = first_difference(plain, ended)
    assert (difference.index, difference.tokens, difference.gap) == (1, (5, 2), 1.0)
