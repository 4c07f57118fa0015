"""racer_local.Llama beside its parent: every dictionary and every chunk is the parent's, drafted."""

from __future__ import annotations

import json
from contextlib import closing
from itertools import islice

import llama_cpp
import numpy as np
import pytest
from llama_cpp import LlamaGrammar, LogitsProcessorList, StoppingCriteriaList
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from racer_local import Llama

pytestmark = pytest.mark.model

EXACT = {"draft": "paper", "max_nodes": 5, "exact": True}
OPEN = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
BATCH_EQUALS_SINGLE = {"flash_attn": True, "type_k": 30, "type_v": 30}

CODE = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul("
LIST = "1. red apple\n2. red pear\n3. red plum\n4. red"
FRANCE = "The capital of France is"
CHAT = [
    {"role": "system", "content": "You answer briefly."},
    {"role": "user", "content": "Name three colours, then name them again in the same order."},
]
YES_OR_NO = 'root ::= ("yes " | "no ") root | "end"'
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOL = {"type": "function", "function": {"name": "note", "description": "Notes a person.", "parameters": NAME}}


def no_comma(ids, logits):
    logits[[28, 30]] = -np.inf
    return logits


def without_ids(value):
    """Without what is another each time."""
    if isinstance(value, dict):
        return {key: without_ids(held) for key, held in value.items() if key not in ("id", "created")}
    return [without_ids(held) for held in value] if isinstance(value, list) else value


def told(llama, method, *args, **kwargs):
    answer = getattr(llama, method)(*args, **kwargs)
    return without_ids(answer if isinstance(answer, dict) else list(answer))


def text_of(answer):
    chunks = [answer] if isinstance(answer, dict) else answer
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


class Pair:
    def __init__(self, ours, parent):
        self.ours, self.parent, self.emitted, self.accepted = ours, parent, 0, 0

    def same(self, method, *args, **kwargs):
        ours = told(self.ours, method, *args, **kwargs)
        self.emitted += self.ours.last_stats["emitted"]
        self.accepted += self.ours.last_stats["accepted"]
        assert ours == told(self.parent, method, *args, **kwargs)
        return ours


@pytest.fixture(scope="module")
def parent(smollm2_path):
    llama = llama_cpp.Llama(str(smollm2_path), **OPEN, **BATCH_EQUALS_SINGLE)
    yield llama
    llama.close()


@pytest.fixture(scope="module")
def all_rows(smollm2_path):
    """A parent that can tell log probabilities."""
    llama = llama_cpp.Llama(str(smollm2_path), **OPEN, **BATCH_EQUALS_SINGLE, logits_all=True)
    yield llama
    llama.close()


@pytest.fixture(scope="module")
def ours(smollm2_path):
    llama = Llama(str(smollm2_path), **OPEN, racer=EXACT)
    yield llama
    llama.close()


@pytest.fixture(scope="module")
def pair(ours, parent):
    pair = Pair(ours, parent)
    yield pair
    assert pair.accepted > pair.emitted / 10 or pair.emitted < 100


COMPLETIONS = {
    "greedy": (CODE, {"max_tokens": 24}),
    "tokens": ([504, 3575, 282, 4649, 314], {}),
    "echo": (FRANCE, {"echo": True}),
    "suffix": (FRANCE, {"suffix": " and that of Italy is Rome."}),
    "suffix after tokens": ([504, 3575, 282, 4649, 314], {"suffix": " of Spain."}),
    "own name": (FRANCE, {"model": "mine", "max_tokens": 2}),
    "a control token's spelling": ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", {}),
    "bias": (FRANCE, {"logit_bias": {7042: -100, "253": 5.0}}),
    "processors": (FRANCE, {"logits_processor": LogitsProcessorList([no_comma, lambda ids, logits: logits * 0.5])}),
    "grammar": (FRANCE, {"grammar": LlamaGrammar.from_string(YES_OR_NO, verbose=False)}),
    "grammar, drawn": (FRANCE, {"grammar": LlamaGrammar.from_string(YES_OR_NO, verbose=False), "temperature": 1.0}),
    "repeat": (LIST, {"repeat_penalty": 1.3}),
    "frequency": (LIST, {"frequency_penalty": 0.7}),
    "presence": (LIST, {"presence_penalty": 1.1}),
    "mirostat 1": (CODE, {"mirostat_mode": 1, "mirostat_tau": 3.0, "temperature": 0.8}),
    "mirostat 2": (CODE, {"mirostat_mode": 2, "mirostat_eta": 0.2, "temperature": 0.8}),
    "typical": (CODE, {"typical_p": 0.5, "temperature": 0.8}),
    "min-p": (CODE, {"min_p": 0.3, "top_p": 1.0, "top_k": 0, "temperature": 1.2}),
    "top-k": (CODE, {"top_k": 3, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}),
    "top-p": (CODE, {"top_k": 0, "top_p": 0.6, "min_p": 0.0, "temperature": 1.0}),
    "plain draw": (CODE, {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": -1.0}),
    **{f"seed {seed}": (CODE, {"seed": seed, "temperature": 0.8}) for seed in (0, 2**32 - 2)},
    **{f"{n} tokens": (CODE, {"max_tokens": n}) for n in (1, 2, 3, 5, 8)},
}


@pytest.mark.parametrize("case", COMPLETIONS)
def test_a_completion_is_the_parents(pair, case):
    prompt, asked = COMPLETIONS[case]
    pair.same("create_completion", prompt, **{"max_tokens": 8, "temperature": 0.0, "seed": 7, **asked})


@pytest.mark.parametrize("case", ["greedy", "tokens", "echo", "own name", "grammar", "repeat", "seed 0", "1 tokens"])
def test_the_chunks_of_a_completion_are_the_parents(pair, case):
    prompt, asked = COMPLETIONS[case]
    asked = {"max_tokens": 8, "temperature": 0.0, "seed": 7, **asked}
    chunks = pair.same("create_completion", prompt, stream=True, **asked)
    whole = pair.ours.create_completion(prompt, **{**asked, "echo": False})
    assert text_of(chunks) == text_of(whole)
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


def test_a_call_of_the_object_is_a_completion(pair):
    pair.same("__call__", FRANCE, None, 12, 0.0)
    pair.same("__call__", FRANCE, max_tokens=12, temperature=0.0, stream=True)


STOPS = {  # of a text whose length is the machine's: some 30 to 70 characters
    "one": lambda text: text[-12:-6],
    "as the only string": lambda text: [text[-12:-6]],
    "the second of several": lambda text: ["zebra", text[-16:-10], text[-5:-1]],
    "inside a word": lambda text: [text[3:5]],
    "over many tokens": lambda text: [text[5:-3]],
    "at once": lambda text: [text[:3]],
    "begun and not ended": lambda text: [text[-5:] + "zebra"],
    "nowhere": lambda text: ["zebra"],
    "none": lambda text: None,
}


@pytest.fixture(scope="module")
def of_france(parent):
    return text_of(parent.create_completion(FRANCE, max_tokens=16, temperature=0.0))


@pytest.mark.parametrize("case", STOPS)
def test_a_stop_string_ends_the_text_where_the_parent_ends_it(pair, of_france, case):
    asked = {"max_tokens": 16, "temperature": 0.0, "stop": STOPS[case](of_france)}
    ours, theirs = (told(llama, "create_completion", FRANCE, **asked) for llama in (pair.ours, pair.parent))
    assert ours["choices"] == theirs["choices"]
    assert ours["usage"]["completion_tokens"] <= theirs["usage"]["completion_tokens"]
    ours, theirs = (
        told(llama, "create_completion", FRANCE, **asked, stream=True) for llama in (pair.ours, pair.parent)
    )
    assert ours == [chunk for chunk in theirs if chunk["choices"][0]["text"]] + theirs[-1:]


CHATS = {
    "greedy": {},
    "seed 3": {"temperature": 0.8, "seed": 3},
    "stop": {"stop": ["ed"]},
    "bias": {"logit_bias": {504: -100}},
    "penalties": {"repeat_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "json": {"response_format": {"type": "json_object"}},
    "json schema": {"response_format": {"type": "json_object", "schema": NAME}, "max_tokens": 24},
    "tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "note"}}, "max_tokens": 24},
    "any tool": {"tools": [TOOL], "tool_choice": "auto"},
}


def chat(case):
    return {"messages": CHAT, "max_tokens": 8, "temperature": 0.0, **CHATS[case]}


@pytest.mark.parametrize("case", CHATS)
def test_a_chat_answer_is_the_parents(pair, case):
    choice = pair.same("create_chat_completion", **chat(case))["choices"][0]
    text = choice["message"]["content"]
    if choice["finish_reason"] == "tool_calls":
        text = choice["message"]["tool_calls"][0]["function"]["arguments"]
    if "schema" in case or case == "tool":
        assert json.loads(text)["name"]


@pytest.mark.parametrize("case", ["greedy", "seed 3", "stop", "json", "tool", "any tool"])
def test_the_chunks_of_a_chat_answer_are_the_parents(pair, case):
    assert len(pair.same("create_chat_completion", **chat(case), stream=True)) > 3


def test_a_handler_that_completes_more_than_once_is_the_parents(pair, monkeypatch):
    answers = []
    for llama, mine in ((pair.ours, {}), (pair.ours, {"racer": False}), (pair.parent, {})):
        monkeypatch.setattr(llama, "chat_format", "chatml-function-calling")
        asked = {"tools": [TOOL], "tool_choice": "auto", "temperature": 0.0, **mine}
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answers.append(without_ids(llama.create_chat_completion(question, **asked)["choices"]))
        if mine:
            assert pair.ours.last_stats["drafted"] == 0
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][0]["message"]["tool_calls"]


def test_a_chat_of_three_turns_is_the_parents(pair):
    messages = []
    for said in ("My name is Ada and I like tea.", "What is my name?", "And what do I like?"):
        messages.append({"role": "user", "content": said})
        answer = pair.same("create_chat_completion", messages, max_tokens=12, temperature=0.0)
        messages.append(answer["choices"][0]["message"])
    assert pair.ours.last_stats["cached_tokens"] > 60


def test_the_chat_answers_of_the_openai_types_are_the_parents(pair):
    pytest.importorskip("openai")
    ours, theirs = (
        llama.create_chat_completion_openai_v1(CHAT, max_tokens=8, temperature=0.0)
        for llama in (pair.ours, pair.parent)
    )
    assert ours.choices == theirs.choices


def test_calls_without_a_seed_go_on_from_the_one_that_was_set(pair):
    for llama in (pair.ours, pair.parent):
        llama.set_seed(5)
    answers = [pair.same("create_completion", FRANCE, max_tokens=6, temperature=1.2) for _ in range(3)]
    assert len({text_of(answer) for answer in answers}) == 3


def test_generated_ids_and_what_is_held_after_them_are_the_parents(pair):
    prompt = pair.parent.tokenize(CODE.encode())
    held = []
    for llama in (pair.ours, pair.parent):
        stream = llama.generate(prompt, temp=0.0)
        ids = list(islice(stream, 20))
        stream.close()
        more = list(islice(llama.generate(ids[-1:], reset=False, temp=0.0), 4))
        again = list(islice(llama.generate([*prompt, *ids[:9]], top_k=1), 4))
        held.append(
            (ids, more, again, llama.n_tokens, llama.input_ids[: llama.n_tokens].tolist(), llama._input_ids.shape)
        )
    assert held[0] == held[1]
    assert held[0][1] != held[0][2] == held[0][0][9:13]


def test_ids_sent_into_the_generator_never_change_what_comes(ours):
    prompt = ours.tokenize(CODE.encode())
    plain = list(islice(ours.generate(prompt, temp=0.0), 10))
    stream = ours.generate(prompt, temp=0.0)
    assert [next(stream), *(stream.send([token, 7]) for token in plain[2:])] == plain[: len(plain) - 1]
    stream.close()


def close_to(ours, theirs, tolerance=1e-4):
    """Equal but for rounding, and no log probability left out."""
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(close_to(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(close_to, ours, theirs))
    if isinstance(theirs, float | np.floating):
        return abs(ours - theirs) < tolerance and (ours < 0.0 or theirs == 0.0)
    return ours == theirs


@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": 3},
        {"logprobs": 0, "temperature": 0.8},
        {"logprobs": 2, "stop": "\n"},
        {"logprobs": 1, "logit_bias": {253: 5.0}},
    ],
)
def test_log_probabilities_are_those_of_a_parent_that_keeps_all_rows(ours, all_rows, asked):
    asked = {"max_tokens": 9, "temperature": 0.0, "seed": 1, **asked}
    mine, theirs = (told(llama, "create_completion", CODE, **asked)["choices"][0] for llama in (ours, all_rows))
    told_of, kept = theirs["logprobs"], len(mine["logprobs"]["tokens"])
    theirs["logprobs"] = {name: values[:kept] for name, values in told_of.items()}
    assert kept == len(told_of["tokens"]) or "stop" in asked
    assert mine["text"].startswith("".join(mine["logprobs"]["tokens"][:-1]))
    assert close_to(mine, theirs)


def test_log_probabilities_of_a_stream_are_those_of_the_whole(ours, all_rows):
    asked = {"max_tokens": 8, "temperature": 0.0, "logprobs": 2}
    whole = ours.create_completion(CODE, **asked)["choices"][0]
    chunks = told(ours, "create_completion", CODE, **asked, stream=True)
    joined = {name: [] for name in whole["logprobs"]}
    for chunk in chunks[:-1]:
        for name, values in chunk["choices"][0]["logprobs"].items():
            joined[name] += values
    assert joined == whole["logprobs"]
    assert chunks[-1]["choices"][0]["logprobs"] is None
    assert close_to(chunks, told(all_rows, "create_completion", CODE, **asked, stream=True))


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_chat_are_the_parents(ours, all_rows, stream):
    asked = {"max_tokens": 6, "temperature": 0.0, "logprobs": True, "top_logprobs": 3, "stream": stream}
    mine, theirs = (told(llama, "create_chat_completion", CHAT, **asked) for llama in (ours, all_rows))
    assert close_to(mine, theirs)


def test_an_echoed_prompt_comes_with_the_log_probabilities_of_its_tokens(ours, all_rows):
    text = CODE * 3
    ours.create_completion(text, max_tokens=4)  # what is held of the prompt must be read again
    answer = ours.create_completion(text, max_tokens=6, temperature=0.0, echo=True, logprobs=2)["choices"][0]
    logprobs, prompt = answer["logprobs"], ours.tokenize(text.encode())
    ids = [*prompt, *islice(ours.generate(prompt, temp=0.0), 6)]
    all_rows.reset()
    all_rows.eval(ids)
    rows = llama_cpp.Llama.logits_to_logprobs(all_rows.scores[: len(ids)])
    words = [ours.detokenize([token]).decode() for token in ids]
    assert logprobs["tokens"] == words
    assert answer["text"] == "".join(words)
    assert logprobs["text_offset"] == [len("".join(words[:n])) for n in range(len(words))]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert close_to(
        logprobs["token_logprobs"][1:], [float(row[token]) for row, token in zip(rows, ids[1:], strict=False)]
    )
    for row, token, top in zip(rows, ids[1:], logprobs["top_logprobs"][1:], strict=False):
        likely = {int(n): float(row[n]) for n in [*np.argsort(-row)[:2], token]}
        assert close_to(top, {ours.detokenize([n]).decode(): value for n, value in likely.items()})


class Watch:
    """A logits processor and a stopping criterion that notes what it sees."""

    def __init__(self, length=None):
        self.seen, self.length = [], length

    def __call__(self, ids, logits):
        self.seen.append((ids.tolist(), int(logits.argmax())))
        return logits if self.length is None else len(ids) >= self.length


def test_logits_processors_see_the_ids_and_rows_that_the_parents_see(pair):
    seen = []
    for llama in (pair.ours, pair.parent):
        first, second = Watch(), Watch()
        processors = LogitsProcessorList([first, no_comma, second])
        llama.create_completion(CODE, max_tokens=20, temperature=0.8, seed=3, logits_processor=processors)
        assert [ids for ids, _ in first.seen] == [ids for ids, _ in second.seen]
        assert all(
            len(longer) == len(ids) + 1 for (ids, _), (longer, _) in zip(first.seen, first.seen[1:], strict=False)
        )
        seen.append((first.seen, second.seen))
    assert len(seen[0][0]) == 20
    assert seen[0] == seen[1]
    assert pair.ours.last_stats["accepted"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_stopping_criteria_see_the_ids_that_the_parents_see(pair, stream):
    prompt, answers = pair.parent.tokenize(CODE.encode()), []
    for llama in (pair.ours, pair.parent):
        watch = Watch(len(prompt) + 9)
        asked = {"max_tokens": 20, "temperature": 0.0, "stopping_criteria": StoppingCriteriaList([watch])}
        answer = told(llama, "create_completion", prompt, **asked, stream=stream)
        answers.append((answer, [ids for ids, _ in watch.seen[:10]], llama.input_ids[: llama.n_tokens].tolist()))
    assert answers[0] == answers[1]
    assert [len(ids) - len(prompt) for ids in answers[0][1]] == list(range(10))
    assert text_of(answers[0][0])


def test_stopping_criteria_see_the_row_that_a_token_was_drawn_from(ours):
    rows, watch = Watch(), Watch(1000)
    asked = {"stopping_criteria": StoppingCriteriaList([watch]), "logits_processor": LogitsProcessorList([rows])}
    ours.create_completion(CODE, max_tokens=10, temperature=0.0, **asked)
    assert watch.seen[:10] == rows.seen[:10]


def test_a_bias_is_honoured_beside_processors_too(ours, parent):
    def unlike_france(ids, logits):
        logits[[7042, 253]] += (-100.0, 5.0)
        return logits

    asked = {"max_tokens": 16, "temperature": 0.8, "seed": 2}
    processors = LogitsProcessorList([no_comma])  # the parent would drop both, and the caller's list would grow
    mine = told(
        ours, "create_completion", FRANCE, logits_processor=processors, logit_bias={7042: -100, "253": 5.0}, **asked
    )
    assert len(processors) == 1
    both = LogitsProcessorList([no_comma, unlike_france])
    assert mine == told(parent, "create_completion", FRANCE, logits_processor=both, **asked)
    assert mine != told(parent, "create_completion", FRANCE, logits_processor=processors, **asked)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["logits_processor", "stopping_criteria"])
def test_an_error_of_the_callers_own_code_reaches_it_and_the_next_call_is_right(pair, kind, stream):
    def fail_late(ids, logits):
        if len(ids) > len(prompt) + 6:
            raise KeyError("mine")
        return logits if kind == "logits_processor" else False

    prompt, asked = pair.ours.tokenize(CODE.encode()), {"max_tokens": 12, "temperature": 0.0, "stream": stream}
    whole = [*prompt, *islice(pair.parent.generate(prompt, temp=0.0), 7)]
    own = {kind: [fail_late] if kind == "logits_processor" else fail_late}
    with pytest.raises(KeyError, match="mine"):
        told(pair.ours, "create_completion", CODE, **own, **asked)
    held = pair.ours.input_ids[: pair.ours.n_tokens].tolist()
    assert held == pair.ours._target.held == whole[: len(held)]
    assert len(held) >= len(prompt) - 1
    pair.same("create_completion", CODE, **asked)


def test_a_draft_model_of_the_parent_is_asked_for_accepted_text_only(smollm2_path, parent):
    class Lookup(LlamaPromptLookupDecoding):
        def __call__(self, ids, /, **kwargs):
            seen.append(ids.tolist())
            return super().__call__(ids, **kwargs)

    seen, prompt = [], parent.tokenize(LIST.encode())
    plain = list(islice(parent.generate(prompt, temp=0.0), 24))
    lookup = Lookup(num_pred_tokens=6, max_ngram_size=3)
    with closing(Llama(str(smollm2_path), **OPEN, draft_model=lookup, racer=EXACT)) as llama:
        assert list(islice(llama.generate(prompt, temp=0.0), 24)) == plain
        assert llama.last_stats["accepted"] > 0
        assert len(seen) == llama.last_stats["steps"] < 24
        assert len(llama.scores) == 1, "no logits are kept that nobody asked for"
        assert all(ids == [*prompt, *plain][: len(ids)] for ids in seen)
        asked = {"max_tokens": 12, "temperature": 0.0}
        assert text_of(llama.create_completion(LIST, **asked)) == text_of(parent.create_completion(LIST, **asked))
        seen.clear()
        llama.create_completion(LIST, **asked, racer=False)
        assert not seen
