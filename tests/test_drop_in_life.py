"""racer_local.Llama: how it is opened, how it ends, and its fast settings."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import islice
from types import ModuleType

import pytest
from llamas import BATCH_EQUALS_SINGLE, EMOJI, EXACT, NO_END, OPEN, PROMPT, opened, parents, run
from tiny_gguf import BOS

from racer_local import ConfigError, Llama, ModelError

# --- what is no text model, and how it is opened ---


def test_a_vocabulary_alone_tokenizes_like_the_parent(tiny_path):
    with closing(opened(tiny_path, vocab_only=True)) as llm, closing(parents(tiny_path, vocab_only=True)) as parent:
        for text in ("", "one two", EMOJI, "<s>x</s>"):
            for asked in ({}, {"add_bos": False}, {"special": True}):
                ids = llm.tokenize(text.encode(), **asked)
                assert ids == parent.tokenize(text.encode(), **asked)
                assert llm.detokenize(ids) == parent.detokenize(ids)
        assert "vocabulary" in llm.last_stats["disabled_reason"]


@pytest.mark.parametrize("pooling", [{}, {"pooling_type": 1}])
def test_embeddings_are_the_parents(tiny_path, pooling):
    asked = {**BATCH_EQUALS_SINGLE, "embedding": True, **pooling}
    with closing(opened(tiny_path, **asked)) as llm, closing(parents(tiny_path, **asked)) as parent:
        assert llm.embed(["one two", "three"]) == parent.embed(["one two", "three"])
        assert llm.create_embedding("one") == parent.create_embedding("one")
        assert "embeddings" in llm.last_stats["disabled_reason"]


def test_from_pretrained_hands_racer_on(tiny_path, monkeypatch):
    hub, utils = ModuleType("huggingface_hub"), ModuleType("huggingface_hub.utils")
    hub.hf_hub_download = lambda **_: str(tiny_path)
    hub.HfFileSystem = type("HfFileSystem", (), {"ls": lambda self, repo, recursive: [f"{repo}/tiny.gguf"]})
    utils.validate_repo_id = lambda repo: None
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", utils)
    with closing(Llama.from_pretrained("me/tiny", "*.gguf", **OPEN, racer=EXACT)) as llm:
        assert isinstance(llm, Llama)
        llm(PROMPT, max_tokens=30, temperature=0.0)
        assert llm.last_stats["exact"]
        assert llm.last_stats["accepted"] > 0
    with pytest.raises(ConfigError, match="known"):
        Llama.from_pretrained("me/tiny", "*.gguf", **OPEN, racer={"nodes": 1})


def test_verbose_shows_the_log_on_stderr_and_nothing_else_does(tiny_path, capfd):
    for verbose in (True, False, True):
        with closing(opened(tiny_path, verbose=verbose)) as llm:
            assert ("llama_model_loader" in capfd.readouterr().err) == verbose
            llm(PROMPT, max_tokens=2)
            captured = capfd.readouterr()
            assert ("perf" in captured.err) == verbose
            assert captured.out == ""
        capfd.readouterr()
    with closing(opened(tiny_path)) as llm:
        llm(PROMPT, max_tokens=2)
    assert capfd.readouterr() == ("", "")


# --- the end of the object ---


@pytest.mark.parametrize("kind", ["completion", "chat", "generate"])
@pytest.mark.parametrize("read_on", [False, True])
def test_closing_twice_or_under_an_open_stream_is_harmless(tiny_path, kind, read_on):
    llm, chat = opened(tiny_path), [{"role": "user", "content": "x"}]
    stream = {
        "completion": lambda: llm(PROMPT, max_tokens=50, stream=True, **NO_END),
        "chat": lambda: llm.create_chat_completion(chat, stream=True, **NO_END),
        "generate": lambda: llm.generate([BOS, 70]),
    }[kind]()
    next(stream)
    next(stream)
    llm.close()
    llm.close()
    if read_on:
        with pytest.raises((ModelError, StopIteration)):
            next(stream)
    stream.close()


def test_closing_under_an_open_stream_lets_a_call_that_waits_for_it_end(tiny_path):
    llm = opened(tiny_path)
    stream = llm(PROMPT, max_tokens=50, stream=True, **NO_END)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(llm.create_completion, [BOS, 70], max_tokens=2)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        llm.close()
        try:
            with pytest.raises(ModelError):
                waiting.result(2)
        finally:
            with suppress(ModelError):
                stream.close()


def test_streams_that_are_left_behind_make_no_noise(tiny_path):
    out, err = run(
        """
import gc, sys
from racer_local import Llama
def open_stream():
    llm = Llama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False, racer={"draft": "lookup"})
    stream = llm("hello hello", max_tokens=50, stream=True, logit_bias={2: -1e9})
    next(stream)
    return llm, stream
llm, stream = open_stream(); del llm; gc.collect(); next(stream); del stream; gc.collect()
llm, stream = open_stream(); del stream, llm; gc.collect()
llm, stream = open_stream(); llm.close(); del stream; gc.collect()
closed, its_stream = open_stream(); closed.close()
still_open, another = open_stream()
print("end")
""",
        tiny_path,
    )
    assert err == ""
    assert out == "end\n"


def test_a_closed_object_refuses_to_work_and_does_not_crash(tiny_path):
    uses = [
        "next(llm.generate([1, 70]))",
        "llm.create_completion([1, 70], max_tokens=2)",
        "llm.create_completion([1, 70], max_tokens=2, racer=False)",
        "llm.create_chat_completion([{'role': 'user', 'content': 'x'}], max_tokens=2)",
        "llm.save_state()",
        "llm.load_state(state)",
        "llm('x', max_tokens=2)",
        "next(llm('x', max_tokens=2, stream=True))",
        "llm.tokenize(b'x')",
        "llm.eval([1, 70])",
    ]
    out, _ = run(
        """
import sys
from racer_local import Llama, ModelError
llm = Llama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False, racer={"draft": "lookup"})
llm("x", max_tokens=2)
state = llm.save_state()
llm.close()
for use in sys.argv[2:]:
    try:
        eval(use)
        print(use)
    except ModelError:
        print("refused")
""",
        tiny_path,
        *uses,
    )
    assert out.splitlines() == ["refused"] * len(uses)


def test_a_wrong_setting_closes_nothing_else_and_makes_no_noise(tiny_path):
    out, err = run(
        """
import gc, sys
from racer_local import Llama
def opened(path=sys.argv[1], **more): return Llama(path, **{"n_ctx": 256, "n_threads": 1, "verbose": False, **more})
good = opened(racer={"draft": "lookup"})
before = good("hello", max_tokens=9, temperature=0.0)["choices"]
bad = [{"racer": "fast"}, {"racer": {"x": 1}}, {"corpora": ["x"]}, {"n_batch": 0}, {"path": "missing.gguf"}]
for wrong in [*bad, {"racer": {"exact": True}, "flash_attn": False, "type_k": 1, "type_v": 1}]:
    for _ in range(2):
        try:
            opened(**wrong)
        except ValueError as error:
            print(type(error).__name__)
    gc.collect()
Llama.__new__(Llama).close()
print(good("hello", max_tokens=9, temperature=0.0)["choices"] == before)
""",
        tiny_path,
    )
    assert err == ""
    assert out.split() == ["ConfigError"] * 4 + ["CorpusError"] * 2 + ["ConfigError"] * 2 + ["ValueError"] * 2 + [
        "ExactnessError"
    ] * 2 + ["True"]


# --- fast settings ---


@pytest.mark.parametrize("flash_attn", [False, True])
def test_in_fast_settings_each_token_is_the_likeliest_of_the_row_it_was_verified_in(tiny_path, flash_attn):
    likeliest, accepted = [], 0
    with closing(opened(tiny_path, racer={"draft": "paper", "max_nodes": 16}, flash_attn=flash_attn)) as llm:
        for prompt in ([BOS, 70, 71, 72] * 8, [BOS, 90]):
            likeliest.clear()
            stream = llm.generate(
                prompt, temp=0.0, stopping_criteria=lambda _, row: likeliest.append(int(row.argmax()))
            )
            assert list(islice(stream, 80)) == likeliest[:80]
            stream.close()
            accepted += llm.last_stats["accepted"]
    assert accepted > 0
