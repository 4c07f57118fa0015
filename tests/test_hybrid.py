"""Models with a recurrent state: rejected tokens stay in it, unless it keeps snapshots that it can go back to."""

from __future__ import annotations

import warnings
from contextlib import closing
from itertools import islice

import llama_cpp
import numpy as np
import pytest
from tiny_gguf import write_tiny_gguf

from racer_local import Llama, cost
from racer_local.config import RECURRENT_NODES, ContextConfig, DraftConfig
from racer_local.llama import LlamaTarget, Model, library
from racer_local.session import Session
from racer_local.tree import DraftTree

pytestmark = pytest.mark.filterwarnings("ignore:.*keeps rejected tokens:RuntimeWarning")

ARCHS = "lfm2", "jamba", "mamba"
PLAIN_ONLY = ARCHS[1:]
BF16 = 30
# A batch gives other bits than single tokens, and so other ids at near ties, unless attention is flash attention over
# bf16 (or q8_0), the matrices are Q8_0 and a tree has no more nodes than exact mode measures: so all compared texts
# are had that way. A second thread would only wait for a core on a small machine.
SAME_BITS = {"flash_attn": True, "type_k": BF16, "type_v": BF16}
SETTINGS = {"n_ctx": 512, "n_batch": 32, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **SAME_BITS}
CONTEXT = ContextConfig(n_ctx=512, n_batch=32, threads=1, flash_attn="on", kv_type="bf16")
LOOKUP = {"draft": "lookup", "exact": True}
PROMPT = [1, *[100, 120, 140] * 12]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A tiny model of each kind; lfm2's text repeats itself, so that drafts are both accepted and rejected."""
    folder = tmp_path_factory.mktemp("hybrid")
    return {arch: write_tiny_gguf(folder / f"{arch}.gguf", arch=arch, n_layer=2, seed=2) for arch in ARCHS}


@pytest.fixture(scope="module")
def lfm2(paths):
    with Model(paths["lfm2"]) as model:
        yield model


@pytest.fixture(params=ARCHS)
def path(request, paths):
    return paths[request.param]


class ByLlama:
    """The front ends with one face: `say` answers with ids, notes the stats, and checks what is held afterwards."""

    def __init__(self, path, racer):
        self.llm = Llama(str(path), racer=racer, **SETTINGS)

    def say(self, prompt, n, **call):
        ids = take(self.llm, prompt, n, **call)
        self.stats, self.held = self.llm.last_stats, [*prompt, *ids[:-1]]
        assert_cache_is(self.llm, self.held)
        return ids

    def close(self):
        self.llm.close()


class BySession:
    def __init__(self, path, racer):
        self.model = Model(path)
        self.session = Session(self.model, CONTEXT, DraftConfig.of(racer))

    def say(self, prompt, n):
        answer = self.session.answer(prompt, max_tokens=n)
        self.stats, ids = vars(answer.stats), answer.token_ids
        self.held = [*prompt, *(ids if answer.stats.finish_reason == "stop" else ids[:-1])]
        assert self.session.target.held == self.held
        return ids

    def close(self):
        self.model.close()


FRONT_ENDS = pytest.mark.parametrize("front_end", [ByLlama, BySession])


def take(llm, prompt, n, **call):
    with closing(llm.generate(prompt, temp=0.0, **call)) as stream:
        return list(islice(stream, n))


def assert_cache_is(llm, tokens):
    """What the Llama says that it holds, what its target says, and where llama.cpp's memory ends."""
    assert llm.n_tokens == len(tokens)
    assert llm.input_ids[: llm.n_tokens].tolist() == llm._target.held == tokens
    assert library.init().llama_memory_seq_pos_max(llm._target._context._memory, 0) == len(tokens) - 1


def fresh_ids(path, prompt, n, front_end=ByLlama):
    """What plain decoding says in a context that held nothing before."""
    with closing(front_end(path, False)) as fresh:
        return fresh.say(prompt, n)


# --- what is drafted ---


@pytest.mark.parametrize("racer", [LOOKUP, {"draft": "paper", "exact": True}, {"exact": True}, {"draft": "lookup"}])
def test_a_state_that_can_be_taken_back_gets_chains(paths, racer):
    if "draft" not in racer:  # it decides by what a draft costs
        with closing(Llama(str(paths["lfm2"]), racer=LOOKUP, **SETTINGS)) as llm:
            cost.remember(llm._target.facts, cost.VerifyCost([1, 8], [1e-3, 1.1e-3]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        llm = Llama(str(paths["lfm2"]), racer=racer, **SETTINGS)
    with closing(llm):
        assert (llm._target._most, llm._target.max_leaves) == ((RECURRENT_NODES, 1), 1)
        assert take(llm, PROMPT, 120) == fresh_ids(paths["lfm2"], PROMPT, 120)
        stats = llm.last_stats
        assert (stats["draft"], stats["disabled_reason"]) == (racer.get("draft", "racer"), None)
        assert stats["drafted"] > 0


@pytest.mark.parametrize("arch", PLAIN_ONLY)
@pytest.mark.parametrize("racer", [True, {"draft": "paper"}, LOOKUP], ids=str)
def test_a_state_that_keeps_rejected_tokens_is_decoded_plainly_with_one_warning(paths, arch, racer):
    with pytest.warns(RuntimeWarning) as told:
        llm = Llama(str(paths[arch]), racer=racer, **SETTINGS)
    assert [str(one.message).partition(": ")[2] for one in told] == [llm.last_stats["disabled_reason"]]
    with closing(llm), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert take(llm, PROMPT, 20) == fresh_ids(paths[arch], PROMPT, 20)
        stats = llm.last_stats
        assert "recurrent or hybrid" in stats["disabled_reason"]
        assert (stats["draft"], stats["drafted"], stats["steps"]) == ("none", 0, 20)
        take(llm, PROMPT, 2, racer=False)
        assert llm.last_stats["disabled_reason"] is None, "nothing was asked for"


def test_the_warning_points_at_the_line_that_opens_the_model(paths):
    with pytest.warns(RuntimeWarning) as told:
        Llama(str(paths["mamba"]), **SETTINGS).close()
    assert told[0].filename == __file__


@FRONT_ENDS
def test_accepted_and_rejected_drafts_leave_the_ids_of_plain_decoding(paths, front_end):
    prompts = PROMPT, [1, *range(60, 90), *range(60, 75)]
    with closing(front_end(paths["lfm2"], LOOKUP)) as drafted:
        for prompt in prompts:
            ids = drafted.say(prompt, 150)
            assert ids == fresh_ids(paths["lfm2"], prompt, 150, front_end)
            assert drafted.stats["drafted"] > drafted.stats["accepted"] > 0
            assert len(ids) == 150
            assert len(set(ids)) > 20, "no text of a few tokens in turn, which any state would go on with"


def test_the_ids_are_those_of_the_parent_class(path):
    with closing(llama_cpp.Llama(str(path), **SETTINGS)) as parent, closing(ByLlama(path, LOOKUP)) as drafted:
        assert drafted.say(PROMPT, 150) == take(parent, PROMPT, 150)


# --- chats ---


@FRONT_ENDS
def test_each_turn_reads_only_what_is_new_and_says_what_a_fresh_instance_says(path, front_end):
    with closing(front_end(path, LOOKUP)) as chat:
        prompt, held = list(PROMPT), 0
        for turn in ([], [50, 51, 52], PROMPT[1:9], [9]):
            prompt += turn
            said = chat.say(prompt, 45)
            assert chat.stats["cached_tokens"] == held
            assert said == fresh_ids(path, prompt, 45, front_end)
            held = len(chat.held)  # all but the token emitted last
            prompt += said


def test_turns_may_switch_drafts_off_and_on(paths):
    with closing(ByLlama(paths["lfm2"], LOOKUP)) as chat:
        prompt = list(PROMPT)
        for racer in (None, False, {"draft": "paper"}, {"draft": "lookup", "max_nodes": 3}, False):
            said = chat.say(prompt, 40, racer=racer)
            assert said == fresh_ids(paths["lfm2"], prompt, 40)
            assert chat.stats["cached_tokens"] == (0 if prompt == PROMPT else len(prompt) - 2)
            prompt += [*said, 50]


EDITS = {
    "the same prompt": lambda text: PROMPT,
    "a shorter prompt": lambda text: PROMPT[:-5],
    "one token": lambda text: PROMPT[:1],
    "another first token": lambda text: [9, *text[1:]],
    "an edited middle": lambda text: [*text[:20], 77, *text[21:]],
    "another prompt": lambda text: [1, *range(100, 120)],
    **{f"the last {n} tokens replaced": lambda text, n=n: [*text[:-n], 88, 89] for n in range(1, 11)},
}


@FRONT_ENDS
def test_an_edited_text_gets_what_a_fresh_instance_says(path, front_end):
    """Above all where the edit lies as few tokens back as a snapshot reaches: it is of the last forward's tokens."""
    with closing(front_end(path, LOOKUP)) as chat:
        for name, edit in EDITS.items():
            text = [*PROMPT, *chat.say(PROMPT, 40)]
            prompt = edit(text)
            assert chat.say(prompt, 30) == fresh_ids(path, prompt, 30, front_end), name


def test_a_stream_closed_anywhere_can_be_gone_on_from(path):
    whole = fresh_ids(path, PROMPT, 60)
    with closing(Llama(str(path), racer=LOOKUP, **SETTINGS)) as llm:
        for n in range(1, 40, 3):
            llm.reset()
            said = take(llm, PROMPT, n)
            assert_cache_is(llm, [*PROMPT, *said[:-1]])
            assert said + take(llm, [*PROMPT, *said], 20) == whole[: n + 20]
            assert llm.last_stats["cached_tokens"] == len(PROMPT) + n - 1


@pytest.mark.parametrize("n_batch", [1, 5, 32])
def test_the_whole_context_is_usable(path, n_batch):
    texts = []
    for racer in (LOOKUP, False):
        with closing(Llama(str(path), racer=racer, **SETTINGS | {"n_ctx": 256, "n_batch": n_batch})) as llm:
            texts.append(list(llm.generate(PROMPT, temp=0.0)))
            assert_cache_is(llm, [*PROMPT, *texts[-1][:-1]])
    assert len(PROMPT) + len(texts[0]) == 256
    assert texts[0] == texts[1]


def test_an_error_in_a_draw_costs_the_text_and_nothing_else(path):
    def fail(ids, row):
        if len(ids) == len(PROMPT) + 20:
            raise ValueError("the caller's")
        return row

    with closing(Llama(str(path), racer=LOOKUP, **SETTINGS)) as llm:
        with pytest.raises(ValueError, match="the caller's"):
            take(llm, PROMPT, 60, logits_processor=[fail])
        assert_cache_is(llm, llm.input_ids[: llm.n_tokens].tolist())
        assert take(llm, PROMPT, 60) == fresh_ids(path, PROMPT, 60)


def test_a_stream_of_chunks_closed_half_way_leaves_what_was_emitted(path):
    with closing(Llama(str(path), racer=LOOKUP, **SETTINGS)) as llm:
        with closing(llm.create_completion(PROMPT, max_tokens=60, temperature=0.0, stream=True)) as stream:
            next(stream)
            next(stream)
        n = llm.n_tokens
        assert n >= len(PROMPT) + 1
        assert_cache_is(llm, [*PROMPT, *fresh_ids(path, PROMPT, n - len(PROMPT))])
        assert take(llm, PROMPT, 30) == fresh_ids(path, PROMPT, 30)


# --- the target ---


def row_after(model, tokens):
    """The logits row after `tokens` where they were read one by one in a fresh context."""
    with LlamaTarget(model, CONTEXT) as target:
        for token in tokens[:-1]:
            target.evaluate(DraftTree.lone(token))
            target.commit([0])
        return target.evaluate(DraftTree.lone(tokens[-1]))[0].copy()


def test_every_part_of_a_chain_can_be_kept(lfm2):
    chain, behind = [50, 51, 52, 53, 54, 55, 56, 57], [60, 61]
    with LlamaTarget(lfm2, CONTEXT, RECURRENT_NODES) as target:
        for n in range(1, len(chain) + 1):
            for kept in range(1, n + 1):
                target.clear()
                target.prefill(PROMPT)
                rows = target.evaluate(DraftTree.chain(chain[:n])).copy()
                target.commit(list(range(kept)))
                assert target.held == [*PROMPT, *chain[:kept]]
                after = target.evaluate(DraftTree.chain(behind)).copy()
                target.commit([])
                for row, text in ((rows[kept - 1], chain[:kept]), (after[-1], chain[:kept] + behind)):
                    np.testing.assert_array_equal(row, row_after(lfm2, [*PROMPT, *text]))


def test_a_chain_dropped_whole_leaves_nothing_and_the_text_is_read_again(lfm2):
    with LlamaTarget(lfm2, CONTEXT, RECURRENT_NODES) as target:
        for chain in ([50], [50, 51, 52], list(range(50, 58))):
            target.prefill(PROMPT)
            target.evaluate(DraftTree.chain(chain))
            target.commit([])
            assert target.held == []
            assert target.prefill(PROMPT) == 0
            np.testing.assert_array_equal(
                target.evaluate(DraftTree.lone(60))[0], row_after(lfm2, [*PROMPT, 60]), err_msg=str(chain)
            )
            target.commit([0])


def test_a_snapshot_of_an_earlier_forward_is_never_gone_back_to(lfm2):
    """After a chain whose snapshots reach back, single tokens overwrite only the nearest one."""
    with LlamaTarget(lfm2, CONTEXT, RECURRENT_NODES) as target:
        for singles in range(4):
            for back in range(1, 10):
                target.prefill(PROMPT)
                target.evaluate(DraftTree.chain(range(50, 58)))
                target.commit(list(range(8)))
                for token in range(singles):
                    target.evaluate(DraftTree.lone(70 + token))
                    target.commit([0])
                text = [*target.held[:-back], 80]
                target.prefill(text)
                row = target.evaluate(DraftTree.lone(81))[0].copy()
                target.commit([0])
                np.testing.assert_array_equal(row, row_after(lfm2, [*text, 81]), err_msg=f"{singles} {back}")


def test_a_long_walk_of_chains_reads_what_single_tokens_read(lfm2):
    rng = np.random.default_rng(0)
    text, seen = list(PROMPT), []
    with LlamaTarget(lfm2, CONTEXT, RECURRENT_NODES) as target:
        target.prefill(PROMPT)
        for _ in range(80):
            chain = [int(token) for token in rng.integers(3, 300, rng.integers(1, 9))]
            kept = int(rng.integers(0, len(chain) + 1)) if rng.random() < 0.3 else int(rng.integers(1, len(chain) + 1))
            rows = target.evaluate(DraftTree.chain(chain)).copy()
            target.commit(list(range(kept)))
            seen += list(zip(range(len(text), len(text) + kept), rows, strict=False))
            text += chain[:kept]
            assert target.held == (text if kept else [])
            if not kept:
                target.prefill(text)
    with LlamaTarget(lfm2, CONTEXT) as fresh:
        for at, token in enumerate(text):
            row = fresh.evaluate(DraftTree.lone(token))[0]
            for _, ours in [pair for pair in seen if pair[0] == at]:
                np.testing.assert_array_equal(ours, row)
            fresh.commit([0])


# --- the other ways into the cache ---


def greedy(llm, tokens):
    """The likeliest token after `tokens`, read by eval()."""
    llm.eval(tokens)
    return llm.sample(temp=0.0)


def test_eval_goes_on_from_an_answer_and_an_answer_from_eval(path):
    with closing(Llama(str(path), racer=LOOKUP, **SETTINGS)) as llm:
        said = take(llm, PROMPT, 30)
        token = greedy(llm, [said[-1], 50, 51])
        text = [*PROMPT, *said, 50, 51]
        assert_cache_is(llm, text)
        assert [token] == fresh_ids(path, text, 1)
        assert take(llm, [*text, token], 30) == fresh_ids(path, [*text, token], 30)
        assert llm.last_stats["cached_tokens"] == len(text)
        assert take(llm, PROMPT, 30) == said


@pytest.mark.parametrize("back", [1, 3, 20])
@pytest.mark.parametrize("by", ["generate", "eval", "load_state"])
def test_a_text_cut_by_the_caller_is_read_again(path, back, by):
    """As n_tokens may be set to go back, see llama_cpp.Llama."""
    with closing(Llama(str(path), racer=LOOKUP, **SETTINGS)) as llm:
        text = [*PROMPT, *take(llm, PROMPT, 30)]
        llm.n_tokens -= back
        prompt = [*text[: llm.n_tokens], 50, 51]
        if by == "load_state":
            llm.load_state(llm.save_state())
        token = greedy(llm, [50, 51]) if by == "eval" else take(llm, [50, 51], 1, reset=False)[0]
        assert_cache_is(llm, prompt)
        assert [token, *take(llm, [*prompt, token], 30)] == fresh_ids(path, prompt, 31)


def test_after_reset_nothing_of_the_text_is_left(path):
    with closing(Llama(str(path), racer=LOOKUP, **SETTINGS)) as llm:
        take(llm, PROMPT, 30)
        for reset in (llm.reset, llm.forget):
            reset()
            assert_cache_is(llm, [])
            assert [greedy(llm, PROMPT)] == fresh_ids(path, PROMPT, 1)
            assert_cache_is(llm, PROMPT)


def test_generate_without_reset_goes_on_from_what_is_held(path):
    with closing(Llama(str(path), racer=LOOKUP, **SETTINGS)) as llm:
        said = take(llm, PROMPT, 30)
        more = take(llm, [said[-1], 50], 30, reset=False)
        assert llm.last_stats["cached_tokens"] == len(PROMPT) + len(said) - 1
        assert more == fresh_ids(path, [*PROMPT, *said, 50], 30)


def test_a_saved_state_is_gone_on_from_here_and_elsewhere(path):
    """Saved right after an answer: part of the last chain was taken back, which no forward has confirmed yet."""
    with closing(Llama(str(path), racer=LOOKUP, **SETTINGS)) as llm:
        for n in (7, 8, 9, 10, 11, 12):
            said = take(llm, PROMPT, n)
            held, prompt = [*PROMPT, *said[:-1]], [*PROMPT, *said, 50]
            state = llm.save_state()
            assert_cache_is(llm, held)
            expected = fresh_ids(path, prompt, 30)
            assert take(llm, prompt, 30) == expected, "saving changes nothing"
            take(llm, [5, 6, 7], 9)
            with closing(Llama(str(path), racer=LOOKUP, **SETTINGS)) as other:
                for one in (llm, other):
                    one.load_state(state)
                    assert_cache_is(one, held)
                    assert take(one, prompt, 30) == expected
                    assert one.last_stats["cached_tokens"] == len(held)
            llm.load_state(state)
            assert [greedy(llm, [said[-1], 50])] == expected[:1]


def test_a_cache_of_states_brings_an_earlier_chat_back(path):
    with closing(Llama(str(path), racer=LOOKUP, **SETTINGS)) as llm:
        llm.set_cache(llama_cpp.LlamaRAMCache(1 << 26))
        first = llm.create_completion(PROMPT, max_tokens=20, temperature=0.0)
        llm.create_completion([5, 6, 7], max_tokens=20, temperature=0.0)
        again = llm.create_completion(PROMPT, max_tokens=20, temperature=0.0)
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
