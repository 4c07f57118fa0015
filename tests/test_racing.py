"""What every front end shares: what an answer may ask for, by which drafter it is answered, and exactness."""

from __future__ import annotations

import itertools
from contextlib import closing

import numpy as np
import pytest
from tiny_gguf import write_tiny_gguf

from racer_local import exact, racing
from racer_local.config import DRAFTERS, ContextConfig, DraftConfig, SamplingConfig
from racer_local.draft import make_drafter
from racer_local.errors import ConfigError, ExactnessError
from racer_local.llama import LlamaTarget, Model, make_sampler
from racer_local.racing import KEEPS_REJECTED, NEVER_EQUAL, OTHER_SETTINGS, Racer, in_the_way
from racer_local.session import Session
from racer_local.stats import GenerationStats
from racer_local.target import Exactness

FAST = ContextConfig(n_ctx=512, threads=1)
DRAFTED = ("lookup", "logits", "retrieval", "paper", "racer")
PROMPTS = (
    [1, *range(40, 60)],
    [1, *[70, 71, 72, 73] * 20],
    [1, *np.random.default_rng(0).integers(3, 300, 90).tolist()],
)


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A home in which nothing is remembered."""
    monkeypatch.setenv("RACER_LOCAL_HOME", str(tmp_path))


@pytest.fixture
def open_racer(tiny, home):
    """Opens racers whose targets are closed with the test; `found` is how far their batches are said to be exact."""
    targets = []

    def open_one(draft=None, context=FAST, found=None, model=tiny, **more):
        draft = draft or DraftConfig(draft="paper")
        targets.append(LlamaTarget(model, context, draft.nodes))
        if found:
            exact.remember(targets[-1].facts, found)
        return Racer(targets[-1], draft, model.end_tokens, **more)

    yield open_one
    for target in targets:
        target.close()


def answer(racer, prompt, draft=None, max_tokens=30, sampling=SamplingConfig()):  # noqa: B008
    """Ids, the rows that they were drawn from, and statistics."""
    stats, ids, rows = GenerationStats(), [], []
    sampler = make_sampler(sampling, racer.target.n_vocab)
    stream = racer.generate(prompt, sampler, max_tokens=max_tokens, end_tokens=(), stats=stats, draft=draft)
    with closing(stream):
        for emitted in stream:
            ids.append(emitted.token)
            rows.append(emitted.logits.copy())
    return ids, rows, stats


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


# --- what an answer may ask for ---


@pytest.mark.parametrize(
    ("opened", "asked", "got"),
    [
        ({}, None, {}),
        ({}, True, {}),
        ({}, {}, {}),
        ({}, False, {"draft": "none"}),
        ({"exact": True}, None, {"exact": True}),
        ({"exact": True}, False, {"exact": True, "draft": "none"}),
        ({"exact": True}, {"exact": False}, {}),
        ({}, {"draft": "lookup"}, {"draft": "lookup"}),
        ({}, {"max_nodes": 8, "exact": True}, {"max_nodes": 8, "exact": True}),
        ({}, {"max_nodes": 64}, {"max_nodes": 64}),
        ({"max_nodes": 16}, {"max_nodes": 16}, {"max_nodes": 16}),
        ({"max_nodes": 16}, {"max_nodes": None}, {}),
        ({"max_nodes": 16}, {"draft": "logits"}, {"max_nodes": 16, "draft": "logits"}),
        ({"breadth": 4}, {"draft": "logits"}, {"breadth": 4, "draft": "logits"}),
        ({}, DraftConfig(draft="logits", max_nodes=3), {"draft": "logits", "max_nodes": 3}),
        ({"ngram": 5}, DraftConfig(draft="paper", ngram=5, exact=True), {"ngram": 5, "exact": True}),
        ({"draft": "none"}, None, {"draft": "none"}),
        ({"draft": "none"}, False, {"draft": "none"}),
        ({"draft": "none"}, {"exact": True}, {"draft": "none", "exact": True}),
        ({"max_nodes": 1}, None, {"max_nodes": 1}),
        ({"max_nodes": 1}, False, {"max_nodes": 1, "draft": "none"}),
        ({"draft": "none", "max_nodes": 8}, None, {"draft": "none", "max_nodes": 8}),
        ({"draft": "none", "max_nodes": 8}, False, {"draft": "none", "max_nodes": 8}),
    ],
    ids=repr,
)
def test_an_answer_gets_what_was_opened_with_what_it_asks_for_changed(open_racer, opened, asked, got):
    racer = open_racer(DraftConfig(**{"draft": "paper", **opened}), found=Exactness(64, True))
    assert racer.for_answer(asked) == DraftConfig(**{"draft": "paper", **got})
    assert racer.draft == DraftConfig(**{"draft": "paper", **opened}), "an answer's wish holds for that answer"


@pytest.mark.parametrize(
    ("opened", "asked", "message"),
    [
        ({}, {"drat": "paper"}, r"no setting 'drat'; known: draft, max_nodes, exact, corpora, remember$"),
        ({}, {"breadth": 4}, r"no setting 'breadth' while it is open; known: draft, max_nodes, exact, "),
        (
            {},
            DraftConfig(draft="paper", breadth=4),
            r"only draft, max_nodes, exact, corpora, remember; the rest is set when",
        ),
        ({}, {"draft": "bigram"}, r"draft is 'bigram'; it must be one of none, lookup, .*racer"),
        ({}, {"max_nodes": 65}, r"max_nodes is 65 and this was opened for 64; open it with more"),
        ({}, DraftConfig(draft="paper", max_nodes=100), r"max_nodes is 100 and this was opened for 64"),
        ({"max_nodes": 8}, {"max_nodes": 9}, r"max_nodes is 9 and this was opened for 8"),
        ({"draft": "lookup"}, {"draft": "paper", "max_nodes": 12}, r"max_nodes is 12 and this was opened for 11"),
        ({}, {"max_nodes": 0}, r"max_nodes is 0; it must be from 1 to 255"),
        ({}, {"max_nodes": "8"}, r"max_nodes is '8'; it must be of type int \| None"),
        ({}, {"exact": 1}, r"exact is 1; it must be of type bool"),
        ({}, "paper", r"racer is 'paper'; it must be True, False, a DraftConfig or a dict"),
        ({}, 1, r"racer is 1; it must be True, False, a DraftConfig or a dict"),
        ({"draft": "none"}, {"draft": "paper"}, r"switched off when this was opened; open it with racer=True"),
        ({"draft": "none"}, DraftConfig(draft="lookup"), r"switched off when this was opened; open it with racer=True"),
        ({"max_nodes": 1}, {"max_nodes": 8}, r"switched off when this was opened; open it with racer=True"),
    ],
    ids=repr,
)
def test_what_an_answer_cannot_have_is_refused_in_one_line_that_says_what_to_change(open_racer, opened, asked, message):
    racer = open_racer(DraftConfig(**{"draft": "paper", **opened}))
    with pytest.raises(ConfigError, match=message) as error:
        racer.for_answer(asked)
    one_line(error)


def test_an_answer_within_fewer_nodes_drafts_no_larger_tree(open_racer, monkeypatch):
    racer, sizes = open_racer(), []
    evaluate = racer.target.evaluate
    monkeypatch.setattr(racer.target, "evaluate", lambda tree: sizes.append(len(tree)) or evaluate(tree))
    for most in (64, 5, 1, 64):
        sizes.clear()
        answer(racer, PROMPTS[1], racer.for_answer({"max_nodes": most}))
        assert max(sizes) == most
    sizes.clear()
    answer(racer, PROMPTS[1], racer.for_answer(False))
    assert max(sizes) == 1


# --- drafters ---


def test_a_drafter_of_each_kind_is_made_once_and_kept(open_racer, monkeypatch):
    made = []
    monkeypatch.setattr(
        racing, "make_drafter", lambda config, *rest: made.append(config) or make_drafter(config, *rest)
    )
    racer = open_racer(DraftConfig(draft="paper", max_nodes=16, ngram=6))
    default = racer.drafter
    for asked in (None, {"draft": "lookup"}, {"max_nodes": 4}, False, {"draft": "lookup", "exact": True}, False, True):
        answer(racer, PROMPTS[0], racer.for_answer(asked), max_tokens=3)
    assert [config.draft for config in made] == ["paper", "lookup", "none"]
    assert [config.nodes for config in made] == [16, DRAFTERS["lookup"], 1]
    assert {config.ngram for config in made} == {6}
    assert racer.drafter is default
    racer.forget()
    assert racer.target.held == []
    assert racer.drafter is not default


def test_the_cost_is_measured_when_a_drafter_first_asks_for_it(open_racer):
    racer = open_racer(DraftConfig(draft="lookup"))
    assert racer.cost is None
    answer(racer, PROMPTS[0], racer.for_answer({"draft": "paper"}), max_tokens=3)
    assert racer.cost is None
    answer(racer, PROMPTS[0], racer.for_answer({"draft": "racer"}), max_tokens=3)
    assert racer.cost.sizes[-1] <= 11, "the target was opened for 11 nodes"


def test_a_drafter_of_ones_own_answers_by_default_and_another_where_it_is_asked_for(open_racer):
    class Own:
        breadth, prompt_rows, asked = 0, 0, 0

        def begin(self, prompt):
            Own.asked += 1
            self.inner = make_drafter(DraftConfig(draft="none"), 320)

        def draft(self, root, limit):
            return self.inner.draft(root, limit)

        def observe(self, tree, top_k): ...

        def accept(self, path, bonus): ...

    own = Own()
    racer = open_racer(own=own)
    assert racer.drafter is own
    for asked, count in ((None, 1), ({"draft": "lookup"}, 1), (False, 1), ({"max_nodes": 4}, 2)):
        answer(racer, PROMPTS[0], racer.for_answer(asked), max_tokens=3)
        assert Own.asked == count
    racer.forget()
    assert racer.drafter is own


# --- statistics ---


@pytest.mark.parametrize(
    ("asked", "found", "stats"),
    [
        (None, None, (False, None, None, "paper")),
        ({"draft": "lookup"}, None, (False, None, None, "lookup")),
        (False, None, (False, None, None, "none")),
        ({"exact": True}, Exactness(16, True), (True, 16, None, "paper")),
        ({"exact": True}, Exactness(5, False), (True, 5, None, "paper")),
        ({"exact": True}, Exactness(1, False), (True, 1, OTHER_SETTINGS, "none")),
        ({"exact": True, "draft": "none"}, Exactness(1, False), (True, 1, None, "none")),
    ],
    ids=repr,
)
def test_statistics_say_what_held_for_the_answer(open_racer, asked, found, stats):
    racer = open_racer(found=found)
    got = answer(racer, PROMPTS[1], racer.for_answer(asked))[2]
    assert (got.exact, got.row_limit, got.disabled_reason, got.draft) == stats
    assert {name: got.as_dict()[name] for name in ("exact", "row_limit")} == {"exact": stats[0], "row_limit": stats[1]}
    assert (got.drafted > 0) == (got.draft != "none")


@pytest.mark.parametrize("exactly", [False, True])
def test_a_memory_that_keeps_rejected_tokens_is_a_reason(open_racer, tmp_path, exactly):
    path = write_tiny_gguf(tmp_path / "mamba.gguf", arch="mamba", n_layer=2)
    with Model(path) as model:
        racer = open_racer(DraftConfig(exact=exactly), model=model)
        stats = answer(racer, PROMPTS[0])[2]
        assert racer.disabled_reason == stats.disabled_reason == KEEPS_REJECTED
        assert (stats.draft, stats.drafted, stats.exact, racer.cost) == ("none", 0, exactly, None)
        assert stats.row_limit == (1 if exactly else None)
        assert answer(racer, PROMPTS[0], racer.for_answer(False))[2].disabled_reason is None


# --- exactness ---


@pytest.mark.parametrize("found", [Exactness(7, False), Exactness(24, True), Exactness(1, False)], ids=repr)
def test_exact_answers_stay_within_what_was_found_and_fast_ones_do_not(open_racer, monkeypatch, found):
    racer, trees = open_racer(found=found), []
    evaluate = racer.target.evaluate
    monkeypatch.setattr(racer.target, "evaluate", lambda tree: trees.append(tree) or evaluate(tree))

    def largest(asked):
        trees.clear()
        answer(racer, PROMPTS[1], racer.for_answer(asked))
        return max(map(len, trees)), max(int(tree.leaf_spans()[1][0]) for tree in trees)

    for _ in range(2):
        assert largest({"exact": True})[0] == found.rows
        assert (largest({"exact": True})[1] > 1) == found.branches
        assert largest({"exact": False})[0] == 64
        assert largest({"exact": False})[1] > 1


@pytest.mark.parametrize(("quant", "flash_attn"), [("F16", "off"), ("Q8_0", "on")], ids=["none", "chains"])
def test_exact_answers_between_fast_ones_are_those_of_plain_decoding_to_the_bit(
    open_racer, tmp_path, quant, flash_attn
):
    """Batches differ here. So text that a fast answer left in the cache must not be built on, nor the other way round.

    The plain racer answers the same exact prompts in the same order, and starts from nothing where a fast one came.
    """
    path = write_tiny_gguf(tmp_path / "tiny.gguf", n_layer=2, quant=quant)
    context = ContextConfig(n_ctx=768, threads=1, flash_attn=flash_attn)
    with Model(path) as model:
        racer = open_racer(context=context, model=model)
        plain = open_racer(DraftConfig(draft="none", exact=True), context, model=model)
        changed, text = 0, PROMPTS[2]
        for asked in ("fast", "exact", "exact", "fast", "fast", "exact", "none", "exact", "fast", "exact"):
            draft = {"fast": {}, "exact": {"exact": True}, "none": {"draft": "none"}}[asked]
            ids, rows, stats = answer(racer, text, racer.for_answer(draft))
            if asked == "exact":
                theirs, plain_rows, _ = answer(plain, text)
                assert ids == theirs
                np.testing.assert_array_equal(rows, plain_rows)
            else:
                _, held, _ = answer(plain, text)
                changed += asked == "fast" and not np.array_equal(rows[: len(held)], held)
                plain.forget()
                assert (stats.drafted > 0) == (asked == "fast")
            text = [*text, *ids, 50]
        assert changed, "a fast answer's rows are others, or this test says nothing"


def test_the_cached_text_is_built_on_only_by_answers_of_the_same_rules(open_racer):
    racer = open_racer(found=Exactness(9, True))
    asked = [{}, {"draft": "lookup"}, {"exact": True}, {"exact": True, "draft": "none"}, {"draft": "none"}, {}]
    cached = [answer(racer, PROMPTS[0], racer.for_answer(draft))[2].cached_tokens for draft in asked]
    assert cached == [0, len(PROMPTS[0]) - 1, 0, len(PROMPTS[0]) - 1, 0, len(PROMPTS[0]) - 1]


@pytest.mark.parametrize("first", [{"draft": "none"}, {"max_nodes": 1}, {"max_nodes": 3}], ids=repr)
def test_what_is_measured_does_not_depend_on_the_answers_before(open_racer, first):
    """Exact answers restrict the target, and a restricted one must not be what is measured and remembered."""
    racer = open_racer(context=ContextConfig(n_ctx=512, threads=1).for_exact())
    answer(racer, PROMPTS[1], racer.for_answer({"exact": True, **first}))
    answer(racer, PROMPTS[1], racer.for_answer({"draft": "racer"}))
    assert racer.cost.sizes[-1] > 3
    answer(racer, PROMPTS[1], racer.for_answer({"exact": True, **first}))
    assert answer(racer, PROMPTS[1], racer.for_answer({"exact": True}))[2].row_limit > 3


@pytest.mark.parametrize(
    ("context", "names"),
    [
        (ContextConfig(flash_attn="off"), ["flash_attn off (--flash-attn)"]),
        (ContextConfig(kv_type="f16"), ["kv_type f16 (--kv-type)"]),
        (ContextConfig(kv_type="f32"), ["kv_type f32 (--kv-type)"]),
        (ContextConfig(flash_attn="off", kv_type="f16"), ["flash_attn off (--flash-attn)", "kv_type f16 (--kv-type)"]),
        (ContextConfig(flash_attn="off", kv_type="bf16"), ["flash_attn off (--flash-attn)"]),
        (ContextConfig(), []),
        (ContextConfig(flash_attn="on"), []),
        (ContextConfig(kv_type="bf16"), []),
        (ContextConfig(kv_type="q8_0"), []),
        (ContextConfig(flash_attn="on", kv_type="bf16"), []),
    ],
    ids=repr,
)
def test_what_stands_in_the_way_is_what_the_user_chose_otherwise(context, names):
    assert in_the_way(context) == names


def contexts(**settings):
    return ContextConfig(n_ctx=256, threads=1, **settings)


@pytest.mark.parametrize(
    ("context", "names"),
    [
        (contexts(flash_attn="off"), ["flash_attn off (--flash-attn)"]),
        (contexts(kv_type="f16"), ["kv_type f16 (--kv-type)"]),
        (contexts(flash_attn="off", kv_type="f16"), ["flash_attn off (--flash-attn) and kv_type f16 (--kv-type)"]),
        (contexts(), []),
    ],
    ids=repr,
)
def test_an_exact_session_names_the_setting_that_keeps_it_from_being_one(tiny, home, context, names):
    """Where one token at a time is all that is exact; without such a setting it decodes plainly, and says so."""
    draft = DraftConfig(draft="paper", exact=True)
    with LlamaTarget(tiny, context.for_exact(), draft.nodes) as target:
        exact.remember(target.facts, Exactness(1, False))
    for nothing in (DraftConfig(draft="none", exact=True), DraftConfig(max_nodes=1, exact=True)):
        with Session(tiny, context, nothing) as session:
            assert session.answer(PROMPTS[0], max_tokens=3).stats.disabled_reason is None
    with Session(tiny, context, DraftConfig(draft="paper")) as session:
        assert session.answer(PROMPTS[1], max_tokens=9).stats.drafted > 0
    if names:
        with pytest.raises(ExactnessError) as error:
            Session(tiny, context, draft)
        assert names[0] in one_line(error)
        assert isinstance(error.value, ConfigError)
    else:
        with Session(tiny, context, draft) as session:
            stats = session.answer(PROMPTS[1], max_tokens=9).stats
            assert (stats.disabled_reason, stats.drafted) == (NEVER_EQUAL, 0)


def test_a_setting_that_is_no_choice_leaves_some_trees(tiny, home):
    context, draft = contexts(kv_type="bf16"), DraftConfig(draft="paper", exact=True)
    with LlamaTarget(tiny, context.for_exact(), draft.nodes) as target:
        exact.remember(target.facts, Exactness(4, False))
    with Session(tiny, context, draft) as session:
        stats = session.answer(PROMPTS[1], max_tokens=20).stats
        assert (stats.row_limit, stats.disabled_reason) == (4, None)
        assert stats.drafted > 0


def test_an_answer_that_cannot_be_exact_is_refused_and_the_next_one_is_answered(open_racer):
    racer = open_racer(found=Exactness(1, False), chosen=["flash_attn=False"])
    fast = answer(racer, PROMPTS[0])[0]
    with pytest.raises(ExactnessError, match="can't be had with flash_attn=False: a batch gives other rows"):
        answer(racer, PROMPTS[0], racer.for_answer({"exact": True}))
    assert answer(racer, PROMPTS[0])[0] == fast
    assert answer(racer, PROMPTS[0], racer.for_answer({"exact": True, "draft": "none"}))[2].exact


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quants")
    opened = {q: Model(write_tiny_gguf(folder / f"{q}.gguf", n_layer=2, quant=q)) for q in ("Q8_0", "Q4_0", "F16")}
    yield opened
    for model in opened.values():
        model.close()


@pytest.mark.parametrize("draft", DRAFTED)
@pytest.mark.parametrize(
    ("quant", "kv_type"), [("Q8_0", None), ("Q4_0", None), ("Q8_0", "bf16"), ("F16", None)], ids=lambda v: v
)
def test_exact_sessions_give_plain_decodings_ids(models, quant, kv_type, draft):
    """With F16 weights nothing is drafted."""
    context = ContextConfig(n_ctx=768, threads=1, kv_type=kv_type)
    plain = DraftConfig(draft="none", exact=True)
    samplings = (SamplingConfig(), SamplingConfig(temperature=0.8, seed=5))
    with (
        Session(models[quant], context, DraftConfig(draft=draft, exact=True)) as drafted,
        Session(models[quant], context, plain) as single,
    ):
        accepted = 0
        for prompt, sampling in itertools.product(PROMPTS, samplings):
            ours = drafted.answer(prompt, sampling=sampling, max_tokens=60)
            assert ours.token_ids == single.answer(prompt, sampling=sampling, max_tokens=60).token_ids
            accepted += ours.stats.accepted
        assert (accepted > 0) == (ours.stats.row_limit > 1)


@pytest.mark.model
def test_a_real_model_without_flash_attention_cannot_be_exact(smollm2, home):
    """Also there where `for_exact` is left to choose the cache's type."""
    with pytest.raises(ExactnessError, match=r"flash_attn off \(--flash-attn\)"):
        Session(smollm2, ContextConfig(n_ctx=1024, threads=1, flash_attn="off"), DraftConfig(draft="paper", exact=True))
