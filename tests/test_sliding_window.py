"""Models whose layers see a window only, and contexts that are used to the last token."""

from __future__ import annotations

from contextlib import closing
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from tiny_gguf import write_tiny_gguf

from racer_local import Llama
from racer_local.errors import DownloadError
from racer_local.llama import library

WINDOW = 32
# With these a tree's rows are those of single tokens to the bit on a CPU, so ids are compared without allowance.
SAME_BITS = {"flash_attn": True, "type_k": 30, "type_v": 30}
SETTINGS = {"n_ctx": 1024, "n_batch": 32, "n_ubatch": 32, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
LONG = [1, *(int(token) for token in np.random.default_rng(1).integers(3, 300, 249))]
PAPER = {"draft": "paper", "exact": True}
FEW_LEAVES = {"draft": "paper", "exact": True, "max_nodes": 6}
CHAINS = {"draft": "lookup", "exact": True, "max_nodes": 6}
SMALL = {"swa_full": False}
"""The layers with a window get a cache of a window for each sequence and a batch, in steps of 256 cells: it forgets."""
CASES = {
    "whole, trees": (PAPER, {}),
    "whole, few leaves": (FEW_LEAVES, {}),
    "whole, chains": (CHAINS, {}),
    "small, trees": (PAPER, SMALL),
    "small, few leaves": (FEW_LEAVES, SMALL),
    "small, chains": (CHAINS, SMALL),
    "small, plain": (False, SMALL),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "gemma3.gguf", arch="gemma3", n_layer=6, window=WINDOW)


@pytest.fixture(params=CASES)
def llm(request, path):
    racer, options = CASES[request.param]
    with closing(Llama(str(path), racer=racer, **SETTINGS, **SAME_BITS, **options)) as llm:
        yield llm


def take(llm, prompt, n, **call):
    with closing(llm.generate(prompt, temp=0.0, **call)) as stream:
        ids = list(islice(stream, n))
    held = [*prompt, *ids[:-1]]
    assert llm.input_ids[: llm.n_tokens].tolist() == llm._target.held == held
    assert library.init().llama_memory_seq_pos_max(llm._target._context._memory, 0) == len(held) - 1
    return ids


@cache
def _fresh_ids(path: Path, prompt: tuple[int, ...], n: int) -> list[int]:
    with closing(Llama(str(path), racer=False, **SETTINGS, **SAME_BITS)) as llm:
        return take(llm, list(prompt), n)


def fresh_ids(path, prompt, n):
    """What plain decoding with a whole cache says in a context that held nothing before."""
    return _fresh_ids(path, tuple(prompt), n)


EDITS = {
    "the same again": lambda text: LONG,
    "an early message edited": lambda text: [*text[:10], 77, 78, *text[12:]],
    "an early message taken out": lambda text: [*text[:10], *text[40:]],
    "back beyond the window": lambda text: text[:50],
    "back by a few tokens": lambda text: [*text[:-5], 7],
    "on from there": lambda text: [*text, 7, 8, 9],
    "its first token only": lambda text: text[:1],
}


def test_a_text_beyond_the_window_is_that_of_plain_decoding(path, llm):
    ids = take(llm, LONG, 500)
    assert ids == fresh_ids(path, LONG, 500)
    assert len(set(ids)) > 20
    drafts = llm._draft.nodes > 1
    assert (llm.last_stats["drafted"] > llm.last_stats["accepted"] > 0) is drafts


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_beyond_the_window_gets_what_a_fresh_instance_says(path, llm, name):
    text = [*LONG, *take(llm, LONG, 150)]
    prompt = EDITS[name](text)
    assert take(llm, prompt, 40) == fresh_ids(path, prompt, 40)


@pytest.mark.parametrize("racer", [CHAINS, False], ids=["chains", "plain"])
@pytest.mark.parametrize("behind", [-60, 10, WINDOW, WINDOW + 40])
def test_what_the_small_cache_forgot_is_read_again_and_no_more(path, racer, behind):
    """A text cut `behind` the first token that is still there in every layer needs the window before its end."""
    with closing(Llama(str(path), racer=racer, **SETTINGS, **SAME_BITS, **SMALL)) as llm:
        text = [*LONG, *take(llm, LONG, 200)]
        first = llm._target._context.forgets_before(0)
        assert first > 100
        prompt = [*text[: first + behind], 7]
        assert take(llm, prompt, 30) == fresh_ids(path, prompt, 30)
        assert llm.last_stats["cached_tokens"] == (first + behind if behind >= WINDOW else 0)


@pytest.mark.parametrize("n", [60, 100, 380])
def test_a_text_cut_by_the_caller_is_read_again_where_its_window_is_forgotten(path, llm, n):
    """As n_tokens may be set to go back, see llama_cpp.Llama."""
    text = [*LONG, *take(llm, LONG, 150)]
    prompt = [*text[:n], 7, 8]
    llm.n_tokens = n
    assert take(llm, prompt, 30) == fresh_ids(path, prompt, 30)
    take(llm, [*text, 9], 2)
    llm.n_tokens = n
    llm.eval([7, 8])
    assert llm.input_ids[: llm.n_tokens].tolist() == llm._target.held == prompt
    ids = [llm.sample(temp=0.0)]
    ids += take(llm, [*prompt, *ids], 29)
    assert ids == fresh_ids(path, prompt, 30)


def test_a_saved_state_is_gone_on_from_here_and_where_nothing_is_drafted(path, llm):
    said = take(llm, LONG, 150)
    prompt = [*LONG, *said, 7]
    state = llm.save_state()
    with closing(Llama(str(path), racer=False, **SETTINGS, **SAME_BITS)) as plain:
        for one in (llm, plain) if llm.context_params.swa_full else (llm,):  # a small cache may be too small for it
            for forget in (one.reset, lambda one=one: take(one, [5, 6, 7], 200)):
                forget()
                one.load_state(state)
                assert take(one, prompt, 40) == fresh_ids(path, prompt, 40)
                assert one.last_stats["cached_tokens"] == len(prompt) - 2


# --- a context that gets full ---


@pytest.mark.parametrize("racer", [{"draft": "paper", "max_nodes": 9}, PAPER | {"max_nodes": 9}, PAPER], ids=str)
def test_the_whole_context_is_usable_and_drafted_for_to_its_end(tiny_path, monkeypatch, racer):
    settings = {**SETTINGS, **(SAME_BITS if "exact" in racer else {})}
    prompt = [1, *[int(token) for token in np.random.default_rng(0).integers(3, 300, 99)] * 9][:900]
    with closing(Llama(str(tiny_path), racer=racer, **settings)) as llm:
        assert llm._target.max_leaves == racer.get("max_nodes", 64) - 1
        real, trees = llm._target.evaluate, []

        def evaluate(tree):
            trees.append((len(llm._target.held), int(tree.leaf_spans()[1][0])))
            return real(tree)

        monkeypatch.setattr(llm._target, "evaluate", evaluate)
        ids = list(llm.generate(prompt, temp=0.0))
        assert len(prompt) + len(ids) == llm.n_ctx() == 1024
        assert (llm.n_tokens, llm.last_stats["finish_reason"]) == (1023, "length")
        assert max(leaves for held, leaves in trees if held > 1000) > 1
        answer = llm.create_completion(prompt, max_tokens=None, temperature=0.0)
        assert answer["usage"]["total_tokens"] <= 1024
        if "exact" in racer:
            with closing(Llama(str(tiny_path), racer=False, **settings)) as plain:
                assert ids == list(plain.generate(prompt, temp=0.0))


# --- a model that speaks ---


@pytest.fixture(scope="module")
def gemma_path():
    from racer_local.models import fetch

    try:
        return fetch("gemma3-270m")
    except DownloadError as error:
        pytest.skip(f"gemma3-270m is not there and can't be fetched: {error}")


@pytest.mark.model
@pytest.mark.parametrize(
    ("window", "n_prompt", "racer", "options"),
    [
        (512, 560, {"draft": "paper", "exact": True, "max_nodes": 2}, {"n_batch": 512, "n_ubatch": 512}),
        # Not exact, which takes long to measure; where a text is copied there are no near ties.
        (128, 300, {"draft": "lookup", "max_nodes": 2}, {"n_batch": 128, "n_ubatch": 128, **SMALL}),
    ],
    ids=["its window", "a quarter of it, small cache"],
)
def test_gemma_goes_on_beyond_its_window_and_after_an_edit(gemma_path, window, n_prompt, racer, options):
    settings = {**SETTINGS, **SAME_BITS, **options, "kv_overrides": {"gemma3.attention.sliding_window": window}}
    demo = (Path(__file__).parent.parent / "examples" / "rewrite.txt").read_text(encoding="utf-8")
    plain = Llama(str(gemma_path), racer=False, **settings)
    with closing(plain), closing(Llama(str(gemma_path), racer=racer, **settings)) as llm:
        assert llm._lent.window == window
        text = llm.tokenize((demo * 5).encode())[:n_prompt]
        assert len(text) == n_prompt
        for prompt, cached in ((text, 0), ([*text[:20], *text[40:]], 0 if "swa_full" in options else 20)):
            plain.reset()
            assert take(llm, prompt, 24) == take(plain, prompt, 24)
            assert llm.last_stats["accepted"] > 0
            assert llm.last_stats["cached_tokens"] == cached
