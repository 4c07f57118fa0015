"""The target on a real llama.cpp context, with a tiny random-weight model."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest
from scripted import RandomDrafter, random_tree
from tiny_gguf import write_tiny_gguf

from racer_local.config import ContextConfig, DraftConfig
from racer_local.cost import VerifyCost
from racer_local.draft import make_drafter
from racer_local.engine import generate
from racer_local.errors import ConfigError, ContextFullError, DecodeError, ModelError
from racer_local.llama import LlamaTarget, Model, library
from racer_local.stats import GenerationStats
from racer_local.tree import DraftTree

EXACT = ContextConfig(n_ctx=1024, n_batch=32, threads=1, flash_attn="on", kv_type="bf16")
PROMPT = [1, *range(40, 60)]


class Greedy:
    def begin(self, prompt): ...

    def draw(self, logits):
        return int(logits.argmax())


def open_target(model, config=EXACT, max_nodes=24):
    return LlamaTarget(model, config, max_nodes)


def row_after(model, tokens, config=EXACT):
    """The logits row after `tokens` by plain single-token forwards in a fresh context."""
    with LlamaTarget(model, config) as target:
        for n in range(len(tokens) - 1):
            target.evaluate(DraftTree.chain([tokens[n]]))
            target.commit([0])
        return target.evaluate(DraftTree.chain([tokens[-1]]))[0].copy()


def cells(target):
    """The cache as llama.cpp sees it: first and last position of the text and of every branch."""
    lib, memory = library.init(), target._context._memory
    text = lib.llama_memory_seq_pos_min(memory, 0), lib.llama_memory_seq_pos_max(memory, 0)
    return text, [lib.llama_memory_seq_pos_max(memory, s) for s in range(1, target.max_leaves)]


def positions_in_cell_order(target, sequence=0):
    """Positions of a sequence's cells in the order in which they lie, read from llama_state_seq_get_data."""
    lib, context = library.init(), target._context.handle
    size = lib.llama_state_seq_get_size(context, sequence)
    raw = (ctypes.c_uint8 * size)()
    assert lib.llama_state_seq_get_data(context, raw, size, sequence) == size
    words = np.frombuffer(raw, np.int32, count=4)
    n = int(words[3])
    cells = np.frombuffer(raw, np.int32, count=4 + 3 * n)[4:].reshape(n, 3)
    assert (cells[:, 1:] == (1, sequence)).all(), "one sequence id a cell: the format is as expected"
    return cells[:, 0].tolist()


def test_every_node_sees_its_own_path_and_nothing_else(tiny):
    rng = np.random.default_rng(0)
    with open_target(tiny) as target:
        target.prefill(PROMPT)
        for _ in range(5):
            tree = random_tree(rng, tiny.n_vocab, 70, 24, 23, 5)
            rows = target.evaluate(tree).copy()
            target.commit([])
            for node in range(len(tree)):
                path, at = [], node
                while at >= 0:
                    path.insert(0, int(tree.tokens[at]))
                    at = tree.parents[at]
                np.testing.assert_allclose(rows[node], row_after(tiny, PROMPT + path), atol=2e-2)


def test_rejected_branch_leaves_no_trace_in_the_cache(tiny):
    """After any mix of kept and dropped paths the cache holds the text in order, and its rows are plain decoding's."""
    rng = np.random.default_rng(1)
    with open_target(tiny) as target:
        target.prefill(PROMPT)
        text = list(PROMPT)
        for _ in range(40):
            tree = random_tree(rng, tiny.n_vocab, int(rng.integers(300)), 24, 23, 5)
            target.evaluate(tree)
            node = int(rng.integers(len(tree)))
            path = []
            while node >= 0:
                path.insert(0, node)
                node = int(tree.parents[node])
            path = path if rng.random() < 0.8 else []
            target.commit(path)
            text += tree.tokens[path].tolist()
            assert target.held == text
            assert cells(target)[0] == (0, len(text) - 1)
            assert all(last < len(text) for last in cells(target)[1])
            assert positions_in_cell_order(target) == list(range(len(text))), "no later token lies in an earlier hole"
        row = target.evaluate(DraftTree.chain([77]))[0]
        np.testing.assert_array_equal(row, row_after(tiny, [*text, 77]))


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_random_trees_give_plain_text_on_a_real_context(tiny, flash_attn, kv_type):
    config = ContextConfig(n_ctx=512, threads=1, flash_attn=flash_attn, kv_type=kv_type)

    def answer(drafter, max_nodes):
        with LlamaTarget(tiny, config, max_nodes) as target:
            out = generate(target, drafter, Greedy(), PROMPT, max_tokens=60, end_tokens=tiny.end_tokens)
            text = [(e.token, e.logits.copy()) for e in out]
            assert target.held[: len(PROMPT)] == PROMPT
            return text

    plain = answer(make_drafter(DraftConfig(draft="none"), tiny.n_vocab), 1)
    for seed in range(4):
        drafted = answer(RandomDrafter(seed, tiny.n_vocab, tiny.end_tokens), 16)
        for (ours, row), (theirs, _) in zip(plain, drafted, strict=False):
            if ours != theirs:
                assert abs(row[ours] - row[theirs]) < 0.05, "may differ at a near tie only"
                assert (flash_attn, kv_type) != ("on", "bf16")
                break


@pytest.mark.parametrize("draft", ["lookup", "logits", "retrieval", "paper", "racer"])
def test_each_drafter_gives_the_plain_token_ids_with_flash_attention_and_bf16(tiny, draft):
    def answer(config):
        drafter = make_drafter(config, tiny.n_vocab, tiny.end_tokens, VerifyCost.parse("unified"))
        stats = GenerationStats()
        with LlamaTarget(tiny, EXACT, config.nodes) as target:
            return [
                e.token for e in generate(target, drafter, Greedy(), PROMPT, max_tokens=200, end_tokens=(), stats=stats)
            ], stats

    plain, _ = answer(DraftConfig(draft="none"))
    text, stats = answer(DraftConfig(draft=draft))
    assert text == plain
    assert stats.emitted == 200
    assert stats.accepted > 0, "a random-weight model repeats itself, which must be drafted"


def test_the_order_of_the_cells_outlives_failures_and_edited_prompts(tiny):
    """Holes may reach past the end of the text; cutting the text must not free them."""
    tree = DraftTree.of([40, 41, 42, 43, 44], [-1, 0, 1, 2, 0])
    with open_target(tiny) as target:
        target.prefill(PROMPT)
        for edit in (None, PROMPT, [*PROMPT, 40, 44, 7], PROMPT[:9]):
            if edit:
                target.prefill(edit)
            target.evaluate(tree)
            target.commit([0, 4])
            target.evaluate(tree)
            target.commit([])
            target.evaluate(DraftTree.chain([5, 6, 7, 8]))
            target.commit([0, 1])
            assert positions_in_cell_order(target) == list(range(len(target.held)))


def test_prefill_holds_exactly_the_tokens_and_reuses_a_shared_start(tiny):
    with open_target(tiny) as target:
        assert target.prefill(PROMPT) == 0
        assert target.prefill([*PROMPT, 5, 6]) == len(PROMPT)
        assert target.prefill([*PROMPT[:9], 8]) == 9
        assert target.held == [*PROMPT[:9], 8]
        assert cells(target)[0] == (0, 9)
        row = target.evaluate(DraftTree.chain([5]))[0]
        np.testing.assert_allclose(row, row_after(tiny, [*PROMPT[:9], 8, 5]), atol=2e-2)
        target.commit([0])
        assert target.prefill([]) == 0
        assert target.held == []


@pytest.mark.parametrize("max_nodes", [1, 2, 24])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 63, 64, 65, 200])
def test_prompt_rows_come_for_every_token_whatever_the_chunks(tiny, n, max_nodes):
    tokens = [int(t) for t in np.random.default_rng(n).integers(3, 300, size=n)]
    seen, best = [], []
    with open_target(tiny, max_nodes=max_nodes) as target:

        def look(chunk, rows):
            assert rows.shape == (len(chunk), tiny.n_vocab)
            seen.extend(chunk)
            best.extend(rows.argmax(axis=1).tolist())

        target.prefill(tokens, look)
    assert seen == tokens
    assert best[-1] == row_after(tiny, tokens).argmax()


def test_a_cancelled_prefill_holds_what_was_evaluated(tiny):
    with open_target(tiny) as target:
        target.prefill(list(range(3, 203)), cancelled=lambda: len(target.held) >= 64)
        assert target.held == list(range(3, 67))
        assert target.prefill(list(range(3, 203))) == 64


@pytest.mark.parametrize("n_prompt", [200, 240, 255])
def test_the_whole_context_is_usable_with_trees(tiny, n_prompt):
    config = ContextConfig(n_ctx=256, n_batch=64, threads=1)
    prompt = [int(t) for t in np.random.default_rng(0).integers(3, 300, size=n_prompt)]
    stats = GenerationStats()
    with LlamaTarget(tiny, config, max_nodes=64) as target:
        drafter = RandomDrafter(0, tiny.n_vocab)
        text = [
            e.token for e in generate(target, drafter, Greedy(), prompt, max_tokens=999, end_tokens=(), stats=stats)
        ]
        assert len(text) == 256 - n_prompt
        assert len(target.held) == 255
    assert stats.drafted > 0 or n_prompt == 255
    assert {(limit.nodes, limit.leaves) for limit in drafter.limits} == {(64, 63)}, "no fall back to small trees"


@pytest.mark.parametrize("kv", [("on", "bf16"), ("off", "f16")], ids=["exact", "fast"])
def test_rejected_cells_never_cost_the_room_of_the_text(tiny, kv):
    """Each step rejects an early branch and keeps a later one. Holes are closed when space is short, in order."""
    config = ContextConfig(n_ctx=250, n_batch=32, threads=1, flash_attn=kv[0], kv_type=kv[1])
    tree = DraftTree.of([40, 41, 42, 43, 44], [-1, 0, 1, 2, 0])
    with LlamaTarget(tiny, config, max_nodes=8) as target:
        for _ in range(120):
            target.evaluate(tree)
            target.commit([0, 4])
        text = [40, 44] * 120
        assert target.held == text
        positions = positions_in_cell_order(target)
        row = target.evaluate(DraftTree.chain([9]))[0]
        if kv == ("on", "bf16"):
            assert positions == list(range(240))
            np.testing.assert_array_equal(row, row_after(tiny, [*text, 9], config))
        else:
            assert sorted(positions) == list(range(240))
            np.testing.assert_allclose(row, row_after(tiny, [*text, 9], config), atol=2e-2)


def test_a_prompt_that_needs_the_room_of_holes_gets_it(tiny):
    tree = DraftTree.of([40, 41, 42, 43, 44], [-1, 0, 1, 2, 0])
    prompt = [int(t) for t in np.random.default_rng(0).integers(3, 300, size=240)]
    config = ContextConfig(n_ctx=250, n_batch=32, threads=1, flash_attn="on", kv_type="bf16")
    with LlamaTarget(tiny, config, max_nodes=8) as target:
        target.prefill(prompt[:20])
        for _ in range(40):
            target.evaluate(tree)
            target.commit([0, 4])
        target.prefill([*prompt[:20], *[40, 44] * 40, *prompt[100:]])
        assert positions_in_cell_order(target) == list(range(240))


def test_a_tree_beyond_the_opened_size_is_refused_with_the_numbers(tiny):
    with open_target(tiny, max_nodes=4) as target:
        with pytest.raises(ConfigError, match="5 nodes and 1 leaves; this target was opened for 4 nodes"):
            target.evaluate(DraftTree.chain([1, 2, 3, 4, 5]))
        target.evaluate(DraftTree.chain([1, 2]))
        target.commit([0])
        assert target.held == [1]


@pytest.mark.parametrize("max_nodes", [0, 256, 1000])
def test_max_nodes_out_of_range_is_refused_before_llama_cpp_sees_it(tiny, max_nodes):
    with pytest.raises(ConfigError, match="from 1 to 255"):
        LlamaTarget(tiny, EXACT, max_nodes)


def test_the_largest_tree_works(tiny):
    rng = np.random.default_rng(5)
    with LlamaTarget(tiny, EXACT, 255) as target:
        wide = DraftTree.of(range(255), [-1] + [0] * 254)
        assert target.evaluate(wide).shape == (255, tiny.n_vocab)
        target.commit([0, 200])
        assert target.held == [0, 200]
        for _ in range(3):
            target.evaluate(random_tree(rng, tiny.n_vocab, 9, 255, 254, 4))
            target.commit([0])
        np.testing.assert_array_equal(target.evaluate(DraftTree.chain([9]))[0], row_after(tiny, [0, 200, 9, 9, 9, 9]))


def test_the_context_full_error_says_the_numbers(tiny):
    with LlamaTarget(tiny, ContextConfig(n_ctx=16, n_batch=16, threads=1)) as target:
        with pytest.raises(ContextFullError, match="16 tokens do not fit into a context of 16"):
            target.prefill(range(3, 19))
        target.prefill(range(3, 18))
        target.evaluate(DraftTree.chain([5]))
        target.commit([0])
        with pytest.raises(ContextFullError, match=r"context of 16 tokens is full: 16 are held.*--ctx"):
            target.evaluate(DraftTree.chain([5]))


def test_a_failing_decode_rolls_back_and_is_named(tiny, monkeypatch):
    with open_target(tiny) as target:
        target.prefill(PROMPT)
        real = library.init().llama_decode
        monkeypatch.setattr(library.init(), "llama_decode", lambda ctx, batch: (real(ctx, batch) and 0) or -3)
        with pytest.raises(DecodeError, match="llama_decode returned -3 for a tree of 2 nodes and 1 leaves"):
            target.evaluate(DraftTree.chain([5, 6]))
        monkeypatch.undo()
        assert cells(target)[0] == (0, len(PROMPT) - 1)
        row = target.evaluate(DraftTree.chain([5]))[0]
        np.testing.assert_array_equal(row, row_after(tiny, [*PROMPT, 5]))


def test_an_interrupt_during_a_forward_rolls_back(tiny, monkeypatch):
    with open_target(tiny) as target:
        target.prefill(PROMPT)
        real = library.init().llama_decode

        def interrupted(ctx, batch):
            real(ctx, batch)
            raise KeyboardInterrupt

        monkeypatch.setattr(library.init(), "llama_decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            target.evaluate(DraftTree.of([5, 6, 7], [-1, 0, 0]))
        monkeypatch.undo()
        assert cells(target)[0] == (0, len(PROMPT) - 1)


class Interrupts:
    """Raises KeyboardInterrupt at the n-th call of a method, once."""

    def __init__(self, monkeypatch, owner, name, at):
        real, calls = getattr(owner, name), iter(range(10**6))

        def call(*args):
            if next(calls) == at:
                raise KeyboardInterrupt
            return real(*args)

        monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("name", ["share", "remove", "rows", "clear", "decode"])
@pytest.mark.parametrize("at", range(0, 40, 3))
def test_an_interrupt_anywhere_costs_at_most_the_step(tiny, monkeypatch, name, at):
    config = ContextConfig(n_ctx=200, n_batch=32, threads=1, flash_attn="on", kv_type="bf16")
    long = [int(t) for t in np.random.default_rng(3).integers(3, 300, size=30)]
    tree = DraftTree.of([40, 41, 42, 43, 44, 45], [-1, 0, 1, 2, 0, 4])
    with LlamaTarget(tiny, config, max_nodes=8) as target:
        Interrupts(monkeypatch, target._context, name, at)
        try:
            target.prefill(PROMPT)
            for path in ([0, 4], [0, 4, 5], [], [0, 1], [0, 4]) * 3:
                target.evaluate(tree)
                target.commit(path)
            target.prefill(PROMPT[:5])
        except KeyboardInterrupt:
            target.commit([])  # as the engine does
        monkeypatch.undo()
        for prompt in (PROMPT, [*PROMPT[:4], *long], long):
            target.prefill(prompt)
            assert target.held == prompt
            row = target.evaluate(DraftTree.of([9, 8, 7], [-1, 0, 0]))[0].copy()
            target.commit([0])
            np.testing.assert_array_equal(row, row_after(tiny, [*prompt, 9], config))
        for _ in range(60):
            target.evaluate(tree)
            target.commit([0, 4])
        assert len(target.held) == 151


def test_a_model_outlives_its_contexts_in_whatever_order_they_are_collected(tiny_path, monkeypatch):
    freed = []
    for name in ("llama_free", "llama_model_free"):
        real = getattr(library.init(), name)

        def free(handle, name=name, real=real):
            freed.append(name)
            real(handle)

        monkeypatch.setattr(library.init(), name, free)
    box = [Model(tiny_path)]
    box += [open_target(box[0]), box]
    del box
    gc.collect()
    assert freed == ["llama_free", "llama_model_free"]


def test_closing_twice_is_harmless_and_a_closed_target_says_so(tiny_path):
    model = Model(tiny_path)
    target = open_target(model)
    target.close()
    target.close()
    with pytest.raises(ModelError, match="closed"):
        target.evaluate(DraftTree.chain([1]))
    model.close()
    model.close()
    with pytest.raises(ModelError, match="closed"):
        open_target(model)


def test_closing_the_model_closes_its_targets_first(tiny_path):
    model = Model(tiny_path)
    target = open_target(model)
    target.prefill(PROMPT)
    model.close()
    with pytest.raises(ModelError, match="this context is closed"):
        target.clear()
    target.close()


def test_a_recurrent_model_is_told_by_its_memory_and_decodes_plainly(tmp_path):
    path = write_tiny_gguf(tmp_path / "mamba.gguf", arch="mamba", n_layer=2, quant="F32")
    with Model(path) as model:
        assert not model.can_branch
        texts = []
        for draft in ("none", "paper"):
            config, stats = DraftConfig(draft=draft), GenerationStats()
            with LlamaTarget(model, EXACT, config.nodes) as target:
                assert target.max_nodes == 1
                for _ in range(3):
                    drafter = make_drafter(config, model.n_vocab, model.end_tokens)
                    out = generate(target, drafter, Greedy(), PROMPT, max_tokens=30, end_tokens=(), stats=stats)
                    texts.append([e.token for e in out])
            assert stats.drafted == 0
        assert all(text == texts[0] for text in texts), "an edited or repeated prompt starts from a clean state"


def test_context_options_pass_through_by_name_and_unknown_ones_list_the_known(tiny):
    def last_row(**options):
        with LlamaTarget(tiny, ContextConfig(n_ctx=64, threads=1, options=options)) as target:
            target.prefill([5, 6, 7])
            return target.evaluate(DraftTree.chain([8]))[0].copy()

    assert not np.allclose(last_row(), last_row(rope_freq_base=5.0), atol=1e-3)
    np.testing.assert_allclose(last_row(), last_row(n_ubatch=1), atol=2e-2)
    with pytest.raises(ConfigError, match=r"no option 'rope'; known: .*rope_freq_base"):
        LlamaTarget(tiny, ContextConfig(options={"rope": 1}))


@pytest.mark.parametrize("name", ["n_seq_max", "swa_full", "type_k", "embeddings", "n_outputs_max", "n_threads_batch"])
def test_context_options_that_would_break_the_tree_are_refused(tiny, name):
    with pytest.raises(ConfigError, match=f"{name} follows from other settings"):
        LlamaTarget(tiny, ContextConfig(options={name: 1}))


def test_a_micro_batch_smaller_than_the_tree_is_raised_to_it(tiny):
    config = ContextConfig(n_ctx=256, n_batch=4, threads=1, options={"n_ubatch": 2})
    with LlamaTarget(tiny, config, max_nodes=32) as target:
        tree = random_tree(np.random.default_rng(0), tiny.n_vocab, 9, 32, 31, 5)
        rows = target.evaluate(tree).copy()
        target.commit([])
        np.testing.assert_allclose(rows[0], row_after(tiny, [9], config), atol=2e-2)


def test_a_tree_is_committed_once_and_before_the_next(tiny):
    with open_target(tiny) as target:
        target.commit([])
        with pytest.raises(RuntimeError, match="commit without an evaluated tree"):
            target.commit([0])
        target.evaluate(DraftTree.chain([5, 6]))
        for call in (lambda: target.evaluate(DraftTree.chain([5])), lambda: target.prefill([1, 2])):
            with pytest.raises(RuntimeError, match="an answer is still open on this target"):
                call()
        target.commit([0])
        with pytest.raises(RuntimeError, match="kept or dropped already"):
            target.commit([0])
        assert target.held == [5]


def test_a_second_answer_on_one_target_waits_for_the_first_to_be_closed(tiny):
    def start(target):
        drafter = make_drafter(DraftConfig(draft="none"), tiny.n_vocab)
        return generate(target, drafter, Greedy(), PROMPT, max_tokens=9, end_tokens=())

    with open_target(tiny) as target:
        first, second = start(target), start(target)
        next(first)
        with pytest.raises(RuntimeError, match="close its iterator first"):
            next(second)
        first.close()
        assert len(list(start(target))) == 9


@pytest.mark.parametrize("kv", [("on", "bf16"), ("off", "f16")], ids=["exact", "fast"])
@pytest.mark.parametrize("draft", ["paper", "lookup"])
def test_a_sliding_window_model_stays_right_beyond_the_window_and_after_an_edit(tmp_path, draft, kv):
    path = write_tiny_gguf(tmp_path / "gemma3.gguf", arch="gemma3", n_layer=6, window=24)
    config = ContextConfig(n_ctx=300, n_batch=32, threads=1, flash_attn=kv[0], kv_type=kv[1])
    long = [int(t) for t in np.random.default_rng(2).integers(3, 300, size=90)]
    with Model(path) as model:

        def answer(target, config, prompt):
            drafter = make_drafter(config, model.n_vocab)
            out = generate(target, drafter, Greedy(), prompt, max_tokens=80, end_tokens=())
            return [(e.token, e.logits.copy()) for e in out]

        drafting = DraftConfig(draft=draft)
        with LlamaTarget(model, config, drafting.nodes) as target:
            for prompt in (long, [*long[:10], *long[40:]], [*long[:10], *long[40:], 7, 8], long[:30]):
                with LlamaTarget(model, config) as fresh:
                    plain = answer(fresh, DraftConfig(draft="none"), prompt)
                drafted = answer(target, drafting, prompt)
                for (ours, row), (theirs, _) in zip(plain, drafted, strict=True):
                    if ours != theirs:
                        assert kv != ("on", "bf16")
                        assert abs(row[ours] - row[theirs]) < 0.05
                        break


def test_model_options_pass_through_by_name(tiny_path):
    with Model(tiny_path, config=_model_config({"check_tensors": True})) as model:
        assert model.n_vocab == 320
    Model(tiny_path, config=_model_config({"tensor_split": (0.75, 0.25), "main_gpu": 0})).close()
    Model(tiny_path, config=_model_config({"tensor_split": 1.0})).close()
    with pytest.raises(ConfigError, match=r"tensor_split=\(0.5, 'x'\) is not of its type"):
        Model(tiny_path, config=_model_config({"tensor_split": (0.5, "x")}))
    for name, value in (("no_alloc", True), ("vocab_only", True), ("load_mode", 9), ("split_mode", -1)):
        with pytest.raises(ConfigError, match=f"the model option {name}"):
            Model(tiny_path, config=_model_config({name: value}))
    with pytest.raises(ConfigError, match="the model has no option 'mmap'"):
        Model(tiny_path, config=_model_config({"mmap": False}))


def _model_config(options):
    from racer_local.config import ModelConfig

    return ModelConfig(options=options)


def test_a_dropped_model_and_target_free_their_memory(tiny_path):
    model = Model(tiny_path)
    target = open_target(model)
    frees = target._context._free, model._free
    del target, model
    gc.collect()
    assert not any(free.alive for free in frees)


def test_an_encoder_is_refused_as_a_generator(tiny, monkeypatch):
    monkeypatch.setattr(library.init(), "llama_get_memory", lambda context: None)
    with pytest.raises(ModelError, match="has no memory of a text"):
        LlamaTarget(tiny, EXACT)


def test_a_prompts_forward_stops_midway_and_the_cache_holds_what_was_evaluated(tiny):
    """llama_set_abort_callback: within one batch, not only between two."""
    tokens, asked = [1, *range(260, 310)] * 8, [0]

    def after(n):
        def cancelled():
            asked[0] += 1
            return asked[0] > n

        return cancelled

    with LlamaTarget(tiny, ContextConfig(n_ctx=512, threads=1, n_batch=128)) as target:
        target.prefill(tokens)
        want = target.evaluate(DraftTree.lone(5)).copy()
        target.commit([])
        held = []
        for n in (0, 5, 70, 100, 150):
            target.clear()
            asked[0] = 0
            target.prefill(tokens, cancelled=after(n))
            assert asked[0] == n + 1
            held.append(len(target.held))
            assert target.held == tokens[: held[-1]]
            assert target.prefill(tokens) == held[-1]
            assert np.array_equal(target.evaluate(DraftTree.lone(5)), want)
            target.commit([])
    assert held == [0, 0, 128, 256, 384]
