"""Objects that the tests of racer_local.Llama open, with models of random weights.

A test module takes the fixtures over by assignment: `exact = llamas.exact`.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing

import llama_cpp
import numpy as np
import pytest
from llama_cpp import LogitsProcessorList
from tiny_gguf import BOS, EOS, FIRST_BYTE

from racer_local import Llama

EXACT = {"draft": "paper", "max_nodes": 16, "exact": True}
OPEN = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
BATCH_EQUALS_SINGLE = {"flash_attn": True, "type_k": 30, "type_v": 30}
PROMPT = "hello hello hello hello"
NO_END = {"logit_bias": {EOS: -1e9}}
SENTENCE = "the cat sat on the mat, and the dog sat on the log"
EMOJI = "é🎉漢字👩‍🚀 ok"


def opened(path, racer=EXACT, **arguments):
    return Llama(str(path), **{**OPEN, **arguments}, racer=racer)


def parents(path, **arguments):
    return llama_cpp.Llama(str(path), **{**OPEN, **BATCH_EQUALS_SINGLE, **arguments})


def text_of(answer):
    chunks = [answer] if isinstance(answer, dict) else list(answer)
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def held_by(llm):
    """What the cache holds; the parent's way of saying it must agree."""
    held = llm.input_ids[: llm.n_tokens].tolist()
    if isinstance(llm, Llama):
        assert held == llm._target.held == llm._input_ids.tolist()
    return held


def piece(text):
    return [FIRST_BYTE + byte for byte in text.encode()]


class Script:
    """Makes a model say these tokens, as a logits processor, and guesses them all, as a draft model."""

    def __init__(self):
        self.tokens, self.start = [], 0

    def __call__(self, ids, logits=None, **_):
        said = len(ids) - self.start
        if logits is None:
            return np.array(self.tokens[said:], np.intc)
        if said < len(self.tokens):
            logits[self.tokens[said]] = 1e9
        return logits


class Speaker:
    """A model that says what a test wants it to, in blocks of drafted tokens."""

    def __init__(self, path):
        self.script = Script()
        self.llm = opened(path, draft_model=self.script)

    def say(self, tokens, **asked):
        prompt = [BOS, *piece("ab")]
        self.script.tokens, self.script.start = tokens, len(prompt)
        processors = LogitsProcessorList([self.script])
        asked = {"max_tokens": len(tokens), "temperature": 0.0, "logits_processor": processors, **asked}
        return prompt, self.llm.create_completion(prompt, **asked)


@pytest.fixture(scope="module")
def exact(tiny_path):
    with closing(opened(tiny_path)) as llm:
        yield llm


@pytest.fixture(scope="module")
def parent(tiny_path):
    with closing(parents(tiny_path)) as llm:
        yield llm


@pytest.fixture(scope="module")
def speaker(tiny_path):
    speaker = Speaker(tiny_path)
    yield speaker
    speaker.llm.close()


def run(code, *arguments):
    """A program of its own; what it prints to stdout and to stderr."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    return child.stdout, child.stderr
