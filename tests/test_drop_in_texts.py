"""racer_local.Llama at the ends of text and context: seeds, counts, stops, characters."""

from __future__ import annotations

from contextlib import closing
from itertools import islice

import llama_cpp
import llamas
import pytest
from llama_cpp import LogitsProcessorList
from llamas import EMOJI, NO_END, OPEN, PROMPT, SENTENCE, Script, held_by, opened, piece, text_of
from tiny_gguf import BOS, EOS, FIRST_BYTE

from racer_local.llama.parent import prompt_tokens

exact, parent, speaker = llamas.exact, llamas.parent, llamas.speaker

# --- seeds ---


@pytest.mark.parametrize("seed", [{}, {"seed": None}, {"seed": -1}])
def test_without_a_seed_each_start_and_each_call_draws_anew(tiny_path, seed):
    texts, asked = [], {"max_tokens": 20, "temperature": 1.5, **NO_END}
    for _ in range(2):
        with closing(opened(tiny_path, **seed)) as llm:
            texts += [text_of(llm(PROMPT, **asked)), text_of(llm(PROMPT, **asked, seed=-1))]
            texts += [text_of(llm(PROMPT, **asked, seed=4)), text_of(llm(PROMPT, **asked, seed=4))]
            llm.set_seed(-1)
            texts.append(text_of(llm(PROMPT, **asked)))
    assert len(set(texts)) == 7
    assert len({texts[n] for n in (2, 3, 7, 8)}) == 1


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 2])
def test_a_seed_repeats_whatever_is_drafted(tiny_path, seed):
    texts = []
    for racer in (None, False):
        for at_start in (True, False):
            with closing(opened(tiny_path, **({"seed": seed} if at_start else {}))) as llm:
                asked = {"max_tokens": 20, "temperature": 1.5, "racer": racer, **NO_END}
                first = text_of(llm(PROMPT, **asked, **({} if at_start else {"seed": seed})))
                texts.append((at_start, first, text_of(llm(PROMPT, **asked))))
    assert len(texts) == 4
    assert len(set(texts)) == 2
    assert all(first != second for _, first, second in texts)


# --- the context's end, and max_tokens ---


@pytest.mark.parametrize("length", [255, 254, 241, 200])
@pytest.mark.parametrize("max_tokens", [None, 0, -1, 1000])
def test_an_answer_may_fill_the_context_to_its_last_token(exact, length, max_tokens):
    prompt = [BOS, *piece("abcab" * 60)][:length]
    asked = {"max_tokens": max_tokens, "temperature": 0.0, **NO_END}
    answer = exact.create_completion(prompt, **asked)
    left = exact.n_ctx() - length
    assert answer["usage"] == {"prompt_tokens": length, "completion_tokens": left, "total_tokens": 256}
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(held_by(exact)) == 255
    assert text_of(exact.create_completion(prompt, **asked, racer=False)) == text_of(answer)
    assert text_of(exact.create_completion(prompt, **asked, stream=True)) == text_of(answer)


@pytest.mark.parametrize("stream", [False, True])
def test_guesses_that_all_come_true_end_with_the_context(speaker, stream):
    said = piece("abcab" * 60)
    prompt, answer = speaker.say(said, max_tokens=None, stream=stream)
    assert text_of(answer) == ("abcab" * 60)[: 256 - len(prompt)]
    assert held_by(speaker.llm) == [*prompt, *said][:255]
    assert speaker.llm.last_stats["finish_reason"] == "length"


def test_generate_ends_where_the_context_does(exact):
    prompt = exact.tokenize(PROMPT.encode())
    assert len(list(exact.generate(prompt, temp=0.0))) == exact.n_ctx() - len(prompt)
    assert exact.last_stats["accepted"] > 0


@pytest.mark.parametrize("n_batch", [1, 32, 256, 10_000])
def test_a_prompt_is_read_in_batches_of_any_size(tiny_path, n_batch):
    with closing(opened(tiny_path, n_batch=n_batch, n_ubatch=max(1, n_batch // 2))) as llm:
        for length in (31, 32, 33, 65):
            prompt = [BOS, *piece("abcab" * 20)][:length]
            asked = {"max_tokens": 12, "temperature": 0.0, **NO_END}
            llm.reset()
            answer = llm.create_completion(prompt, **asked)
            assert answer["usage"]["prompt_tokens"] == length
            assert text_of(answer) == text_of(llm.create_completion(prompt, **asked, racer=False))


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize(("racer", "depth"), [(None, 16), ({"max_nodes": 4}, 4), (False, 1)])
def test_counts_are_exact_where_every_guess_comes_true(speaker, max_tokens, racer, depth):
    said = piece("serving " * 8)
    _, answer = speaker.say(said, max_tokens=max_tokens, racer=racer)
    assert text_of(answer) == ("serving " * 8)[:max_tokens]
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["choices"][0]["finish_reason"] == "length"
    stats = speaker.llm.last_stats
    assert stats["steps"] == -(-max_tokens // depth)
    assert stats["accepted"] == max_tokens - stats["steps"]
    prompt, chunks = speaker.say(said, max_tokens=max_tokens, racer=racer, stream=True)
    chunks = list(chunks)
    assert len(chunks) == max_tokens + 1
    assert held_by(speaker.llm) == [*prompt, *said[: max_tokens - 1]]


# --- stops ---


@pytest.mark.parametrize(
    ("stop", "end"),
    [
        (["mat", "cat"], "the "),
        (["cat", "mat"], "the "),
        (["sat on the log", "sat on the mat"], "the cat "),
        (["at", "cat sat"], "the c"),
        (["the dog", "t, and the d"], "the cat sat on the ma"),
        (["logs", "the cats", "on the logbook"], SENTENCE),
        (["", "dog"], "the cat sat on the mat, and the "),
        (("dog",), "the cat sat on the mat, and the "),
        (["t"], ""),
    ],
)
def test_the_stop_string_that_comes_first_cuts_all_at_one_place(speaker, stop, end):
    asked = {"stop": stop, "logprobs": 1}
    prompt, answer = speaker.say(piece(SENTENCE), **asked)
    choice = answer["choices"][0]
    assert choice["text"] == end
    assert choice["finish_reason"] == ("length" if end == SENTENCE else "stop")
    assert choice["logprobs"]["tokens"] == list(end)
    assert answer["usage"]["completion_tokens"] == len(end)
    chunks = list(speaker.say(piece(SENTENCE), **asked, stream=True)[1])
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [*end, ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert held_by(speaker.llm)[: len(prompt)] == prompt


def test_a_stop_string_inside_a_token_cuts_its_text_and_keeps_its_count(speaker):
    tokens = [*speaker.llm.tokenize(b"a b c", add_bos=False), *piece("!")]
    pieces = [speaker.llm.detokenize([token]).decode() for token in tokens]
    assert pieces == [" a", " b", " c", "!"]
    _, answer = speaker.say(tokens, stop=["c", "b"], logprobs=0)
    assert text_of(answer) == " a "
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["logprobs"]["tokens"]) == 2
    assert text_of(speaker.say(tokens, stop=["c", "b"], stream=True)[1]) == " a "
    for stream in (False, True):  # one token completes both
        assert text_of(speaker.say(tokens, stop=["c", "b c"], stream=stream)[1]) == " a "


@pytest.mark.parametrize("stop", ["logbook", "g!", "log\n\n"])
def test_a_stop_string_that_only_began_is_given_out_at_the_end(speaker, stop):
    chunks = list(speaker.say(piece(SENTENCE), stop=[stop], stream=True)[1])
    assert text_of(chunks) == SENTENCE
    assert all(len(chunk["choices"][0]["text"]) == 1 for chunk in chunks[:-1])
    _, answer = speaker.say([*piece(SENTENCE), EOS], stop=[stop], max_tokens=100)
    assert text_of(answer) == SENTENCE
    assert answer["choices"][0]["finish_reason"] == "stop"


# --- ends ---


@pytest.mark.parametrize("length", [0, 1, 7, 15, 16, 17, 40])
@pytest.mark.parametrize("stream", [False, True])
def test_nothing_behind_an_end_token_is_kept(speaker, length, stream):
    said = piece(SENTENCE)[:length]
    prompt, answer = speaker.say([*said, EOS, *piece(" beyond")], max_tokens=100, stream=stream)
    answer = list(answer) if stream else [answer]
    assert text_of(answer) == SENTENCE[:length]
    assert answer[-1]["choices"][0]["finish_reason"] == "stop"
    assert held_by(speaker.llm) == [*prompt, *said]
    assert speaker.llm.last_stats["emitted"] == length
    speaker.llm.create_completion([*prompt, *said, EOS, *piece("on")], max_tokens=1)
    assert speaker.llm.last_stats["cached_tokens"] == len(prompt) + length


def test_generate_goes_on_behind_an_end_token_as_the_parent_does(tiny_path, parent):
    prompt = parent.tokenize(PROMPT.encode())

    def end_at_once(ids, logits):
        logits[EOS] += 1e9 * (len(ids) == len(prompt) + 3)
        return logits

    with closing(opened(tiny_path)) as llm:
        ids = [list(islice(one.generate(prompt, temp=0.0, logits_processor=[end_at_once]), 9)) for one in (llm, parent)]
    assert ids[0] == ids[1]
    assert ids[0][3] == EOS


# --- characters ---


def test_streamed_characters_come_whole(speaker):
    for asked in ({}, {"stop": ["🎉🎉", "漢語"]}, {"logprobs": 1}):
        chunks = list(speaker.say(piece(EMOJI), **asked, stream=True)[1])
        assert [chunk["choices"][0]["text"] for chunk in chunks] == [*EMOJI, ""]
        assert text_of(speaker.say(piece(EMOJI), **asked)[1]) == EMOJI
    assert text_of(speaker.say(piece(EMOJI), stop=["漢"])[1]) == EMOJI[:2]
    assert text_of(speaker.say(piece(EMOJI), stop=["漢"], stream=True)[1]) == EMOJI[:2]


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_may_end_inside_a_character(speaker, stream):
    data = EMOJI.encode()
    for n in range(1, len(data)):
        for logprobs in (None, 0):
            prompt, answer = speaker.say(piece(EMOJI), max_tokens=n, stream=stream, logprobs=logprobs)
            answer = list(answer) if stream else [answer]
            assert text_of(answer) == data[:n].decode(errors="ignore")
            assert answer[-1]["choices"][0]["finish_reason"] == "length"
            assert len(held_by(speaker.llm)) == len(prompt) + n - 1


def test_bytes_that_are_no_text_are_left_out_and_hold_nothing_back(speaker):
    tokens = [*piece("a"), FIRST_BYTE + 0xFF, *piece("b"), FIRST_BYTE + 0x80, *piece("c")]
    chunks = list(speaker.say(tokens, stream=True)[1])
    assert [chunk["choices"][0]["text"] for chunk in chunks][:-1] == ["a", "", "b", "", "c"]
    assert text_of(speaker.say(tokens)[1]) == "abc"


def test_an_empty_prompt_begins_a_text_as_the_parents_does(exact, parent):
    asked = {"temperature": 0.0, **NO_END}
    answer = exact.create_completion("", max_tokens=12, **asked)
    theirs = parent.create_completion("", max_tokens=13, **asked)  # it counts the BOS, and may overshoot
    assert text_of(theirs).startswith(text_of(answer))
    assert answer["usage"]["completion_tokens"] == 12
    assert text_of(exact.create_completion([], max_tokens=12, **asked)) == text_of(answer)
    assert text_of(exact.create_completion("", max_tokens=12, **asked, stream=True)) == text_of(answer)


class Recorder(llama_cpp.Llama):
    """A parent that notes the tokens of each prompt and says nothing."""

    def generate(self, tokens, **_):
        self.asked = list(tokens)
        yield self.token_eos()


@pytest.mark.parametrize("model", ["tiny_path", pytest.param("smollm2_path", marks=pytest.mark.model)])
@pytest.mark.parametrize("spm_infill", [False, True])
def test_the_tokens_of_a_prompt_are_the_parents(request, model, spm_infill):
    path = str(request.getfixturevalue(model))
    with closing(Recorder(path, **OPEN, vocab_only=True, spm_infill=spm_infill)) as parent:
        parent._n_ctx = 4096
        for prompt in ("x", " x", "one\n two ", "é🎉", "</s>x<|im_end|>y", [70, 71], ""):
            for suffix in (None, "", " y", "y", "☺", "</s>"):
                if prompt or suffix is not None:
                    parent.create_completion(prompt, suffix=suffix)
                    assert prompt_tokens(parent, prompt, suffix) == parent.asked, (prompt, suffix)


def test_a_prompt_that_brings_its_own_bos_is_warned_of(exact):
    with pytest.warns(RuntimeWarning, match="duplicate leading"):
        exact.create_completion("<s>x", max_tokens=1)


def test_an_empty_prompts_text_begins_without_the_space_of_its_first_word(exact, parent):
    script = Script()
    script.tokens, script.start = exact.tokenize(b"a b c", add_bos=False), 1
    assert exact.detokenize(script.tokens) == b" a b c"
    asked = {"logits_processor": LogitsProcessorList([script])}
    assert text_of(parent.create_completion("", max_tokens=4, **asked)) == "a b c"
    for stream in (False, True):  # the parent's stream keeps the space
        assert text_of(exact.create_completion("", max_tokens=3, stream=stream, **asked)) == "a b c"
