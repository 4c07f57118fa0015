from __future__ import annotations

import threading
from collections import Counter

import pytest

from racer_local.config import ContextConfig, DraftConfig, SamplingConfig
from racer_local.errors import ConfigError, ModelError
from racer_local.llama import Model, render_chat
from racer_local.session import Answer, Drawn, Session, first_difference
from racer_local.stats import GenerationStats
from racer_local.tree import Source

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


def test_pieces_tell_tokens_sources_and_where_steps_end(tiny):
    stats = GenerationStats()
    with open_session(tiny) as session:
        pieces = list(session.stream("seven eight", max_tokens=60, stats=stats, likely=2))
    tokens = [token for piece in pieces for token in piece.tokens]
    assert len(tokens) == stats.emitted == 60
    assert sum(token.source is Source.ROOT for token in tokens) in (stats.steps, stats.steps - 1)
    accepted = Counter(token.source.name.lower() for token in tokens if token.source is not Source.ROOT)
    assert accepted == {name: count for name, count in stats.accepted_by_source.items() if count}
    assert stats.accepted > 0
    assert all(token.likely.top[0][0] == token.id and token.likely.logprob < 0 for token in tokens)  # greedy


def test_a_stop_string_ends_a_session_answer_and_is_no_part_of_it(tiny):
    with open_session(tiny) as session:
        whole = session.answer("x y", max_tokens=60).text
        stop = whole[10]
        cut = session.answer("x y", max_tokens=60, stop=[stop])
    assert cut.text == whole[: whole.index(stop)]
    assert cut.stats.finish_reason == "stop"


def test_closing_a_stream_early_frees_the_session_at_once(tiny):
    with open_session(tiny) as session:
        whole = session.answer("x y", max_tokens=40).token_ids
        stream = session.stream("x y", max_tokens=40)
        next(stream)
        stream.close()
        assert session.answer("x y", max_tokens=40).token_ids == whole


def test_what_one_owner_taught_drafts_for_no_other(tiny):
    def ask(session, owner):
        stats = GenerationStats()
        list(session.stream("x y", max_tokens=60, stats=stats, owner=owner))
        return stats.steps, stats.cached_tokens

    with open_session(tiny) as session:
        first, again, other = ask(session, "a"), ask(session, "a"), ask(session, "b")
        assert again[0] < first[0]
        assert again[1] > 0
        assert other == first
        assert ask(session, "a") == (again[0], 0)  # it knows still, and its prompt is not cached any more


def test_the_owner_who_asked_longest_ago_is_forgotten_first(tiny, monkeypatch):
    monkeypatch.setattr("racer_local.racing.OWNERS", 2)
    with open_session(tiny) as session:

        def steps(owner):
            stats = GenerationStats()
            list(session.stream("x y", max_tokens=60, stats=stats, owner=owner))
            return stats.steps

        first = steps("a")
        steps("b")
        assert steps("a") < first
        steps("c")  # b goes
        assert steps("a") < first
        assert steps("b") == first
