"""What the tests of the benches share: flags, a command line, traces made by hand."""

from __future__ import annotations

import json

import numpy as np

from racer_local import cli
from racer_local.bench.record import WIDTH
from racer_local.bench.trace import Trace
from racer_local.config import ContextConfig

EXACT = ContextConfig(n_ctx=256, threads=1, flash_attn="on", kv_type="bf16")
EXACT_FLAGS = ["--threads", "1", "--ctx", "256", "--flash-attn", "on", "--kv-type", "bf16"]
FLAT = "1:1 64:1"


def run(capsys, *args):
    """(exit code, stdout, stderr) of a command in this process."""
    try:
        code = cli.main([str(arg) for arg in args])
    except SystemExit as error:
        code = error.code
    out = capsys.readouterr()
    return code, out.out, out.err


def refused(capsys, *args):
    """The one line of a command that can't be run."""
    code, out, err = run(capsys, *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


def write_lines(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def make_trace(*answers, k=WIDTH):
    """A trace of (category, prompt, answer), one conversation each; each row's likeliest token is the next one."""
    texts = [np.array([*prompt, *answer], np.int32) for _, prompt, answer in answers]
    tokens = np.concatenate(texts)
    ids, probs = np.full((len(tokens), k), -1, np.int32), np.zeros((len(tokens), k), np.float16)
    offsets = np.concatenate([[0], np.cumsum([len(text) for text in texts])]).astype(np.int64)
    ids[:-1, 0], probs[:-1, 0] = tokens[1:], 0.75
    ids[:-1, 1], probs[:-1, 1] = 0, 0.125
    for end in offsets[1:]:  # the last token of each was not evaluated
        ids[end - 1], probs[end - 1] = -1, 0
    spans = [(i, len(prompt), len(prompt) + len(answer)) for i, (_, prompt, answer) in enumerate(answers)]
    categories = np.array([category for category, _, _ in answers])
    return Trace(tokens, offsets, ids, probs, np.array(spans, np.int32), categories)


COUNTING = [1, 2, 3, 4, 5, 6, 7, 8]
REPEATS = ("repeats", COUNTING, COUNTING)
DIFFERS = ("differs", [1, 2, 3, 1], [9, 9])


def random_trace():
    """Texts that repeat themselves in part, two of a category."""
    rng = np.random.default_rng(0)
    answers = []
    for i in range(4):
        phrases = [rng.integers(1, 30, 6).tolist() for _ in range(3)]
        text = [token for n in rng.integers(3, size=14) for token in [*phrases[n], int(rng.integers(1, 30))]]
        answers.append((("a", "b")[i % 2], text[:30], text[30:]))
    return make_trace(*answers)
