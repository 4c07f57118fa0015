from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chisquare

from racer_local.config import ContextConfig, DraftConfig, SamplingConfig
from racer_local.errors import ConfigError
from racer_local.llama import make_sampler
from racer_local.llama.grammar import grammar_of, integers, wrapped
from racer_local.session import Session
from racer_local.stats import GenerationStats

PEOPLE = {
    "type": "array",
    "minItems": 2,
    "maxItems": 2,
    "items": {
        "type": "object",
        "properties": {"zip": {"type": "string", "maxLength": 3}, "age": {"enum": [1, 2]}, "ok": {"type": "boolean"}},
        "required": ["zip", "age", "ok"],
        "additionalProperties": False,
    },
}
NESTED = {"type": "object"}
for _ in range(40):
    NESTED = {"type": "object", "properties": {"x": NESTED}}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("draft", ["none", "paper"])
def test_any_answer_is_of_the_schema_drafted_or_not(tiny, draft, seed):
    config = SamplingConfig(temperature=1.5, seed=seed, top_k=0, top_p=1.0, min_p=0.0, grammar=grammar_of(PEOPLE))
    context = ContextConfig(n_ctx=512, threads=1, flash_attn="on", kv_type="bf16")
    with Session(tiny, context, DraftConfig(draft=draft)) as session:
        answer = session.answer("people", sampling=config, max_tokens=400)
        with Session(tiny, context, DraftConfig(draft="none")) as plain:
            assert answer.token_ids == plain.answer("people", sampling=config, max_tokens=400).token_ids
    assert answer.stats.finish_reason == "stop"
    people = json.loads(answer.text)
    assert [list(each) for each in people] == [["zip", "age", "ok"]] * 2
    assert all(each["age"] in (1, 2) and len(each["zip"]) <= 3 for each in people)


def test_draws_under_a_grammar_follow_the_distribution_of_what_it_allows(tiny):
    letters = {token for token in range(tiny.n_vocab) if tiny.piece(token) in (b"a", b"b", b"c")}
    allowed = sorted(letters | tiny.end_tokens)
    logits = np.linspace(-2, 2, tiny.n_vocab, dtype=np.float32)
    opened = SamplingConfig(temperature=1.0, seed=1, top_k=0, top_p=1.0, min_p=0.0, grammar="root ::= [abc]*")
    drawn = Counter()
    for seed in range(3000):
        sampler = make_sampler(replace(opened, seed=seed), tiny.n_vocab, tiny)
        sampler.begin([1])
        drawn[sampler.draw(logits)] += 1
    assert sorted(drawn) == allowed
    weights = np.exp(logits[allowed].astype(float))
    counts = [drawn[token] for token in allowed]
    assert chisquare(counts, sum(counts) * weights / weights.sum()).pvalue > 1e-4


def test_a_text_stands_before_and_behind_what_a_grammar_describes(tiny):
    config = SamplingConfig(grammar=wrapped(grammar_of({"const": "x"}), "<a>\n", "\n</a>"))
    with Session(tiny, ContextConfig(n_ctx=128, threads=1), DraftConfig(draft="none")) as session:
        assert session.answer("hello", sampling=config, max_tokens=60).text == '<a>\n"x"\n</a>'


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "string", "pattern": "^.{3}$"},
        {"type": "string", "pattern": "^[^a]x$"},
        {"const": '[^a] "quoted" \\'},
        {"type": "object", "additionalProperties": {"type": "string", "maxLength": 2}, "maxProperties": 1},
        {"enum": [None, True, 1.5, "\u00e9\n", {"a": []}]},
        {"type": ["string", "null"]},
        {},
    ],
)
def test_what_a_schema_allows_is_always_json(tiny, schema):
    for seed in range(8):
        config = SamplingConfig(temperature=3.0, seed=seed, top_k=0, top_p=1.0, min_p=0.0, grammar=grammar_of(schema))
        with Session(tiny, ContextConfig(n_ctx=512, threads=1), DraftConfig(draft="none")) as session:
            answer = session.answer("x", sampling=config, max_tokens=400)
        if answer.stats.finish_reason == "stop":
            json.loads(answer.text)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "maxLength": 10**9}, "maxLength is 1000000000 in the JSON schema"),
        ({"type": "array", "items": {}, "minItems": -1}, "minItems is -1"),
        (NESTED, "nested more than 32 deep"),
        ({"type": "nonsense"}, "can't be made a grammar"),
        ({"$ref": "https://example.org/x.json"}, "not allowed"),
        ({"$ref": "#/nothing"}, "can't be made a grammar"),
        ({"type": "string", "pattern": "^(a|b"}, "can't be read"),
        *[
            ({"type": "string", "pattern": f"^{matches}$"}, "a quote, a backslash or a control character")
            for matches in ('"', r"\\\\", r"\n", r"[\t]", "[ -~]{3}", "(x|[!-z]+)", '(a[#\\["])?', "\x01")
        ],
        *[
            ({"type": "string", "pattern": f"^{much}$"}, "repeats too much")
            for much in ("a?" * 17, "a{65}", "a{0,1000}", "(x[a-z]{0,70})", "a*" * 40)
        ],
        ({"type": "string", "pattern": "a" * 300}, "has 300 characters"),
        ({"const": float("nan")}, "can't be made a grammar"),
        ({"enum": ["\ud800"]}, "can't be made a grammar"),
        ({"properties": {f"p{i}": {} for i in range(2000)}}, "too large"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no whole number"),
        ({"enum": ["x" * 300_000]}, "a grammar of 3"),
    ],
)
def test_a_schema_that_cannot_be_kept_to_is_refused_in_one_line(schema, message):
    with pytest.raises(ConfigError, match=message) as caught:
        grammar_of(schema)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 0), (8, 12), (1, 150), (-3, 3), (-120, -5), (99, 1001), (0, 9), (5, None), (None, 40), (None, -17)],
)
def test_the_grammar_of_an_integer_is_that_of_its_bounds(low, high):
    expression = re.compile(re.sub(r'[" ]', "", integers(low, high)))
    allowed = {n for n in range(-1300, 1300) if expression.fullmatch(str(n))}
    assert allowed == {n for n in range(-1300, 1300) if (low is None or n >= low) and (high is None or n <= high)}
    assert not any(expression.fullmatch(text) for text in ("", "-", "01", "00", "-0", "-01"))


@pytest.mark.parametrize(
    "schema",
    [{"minimum": 5, "maximum": 6}, {"exclusiveMinimum": 4, "exclusiveMaximum": 7}, {"minimum": 4.5, "maximum": 6.5}],
)
def test_an_integer_stays_within_its_bounds(tiny, schema):
    grammar, texts = grammar_of({"type": "integer", **schema}), set()
    for seed in range(12):
        config = SamplingConfig(temperature=3.0, seed=seed, top_k=0, top_p=1.0, min_p=0.0, grammar=grammar)
        with Session(tiny, ContextConfig(n_ctx=64, threads=1), DraftConfig(draft="none")) as session:
            texts.add(session.answer("x", sampling=config, max_tokens=8).text.strip())
    assert texts == {"5", "6"}


def test_a_schema_may_refer_to_itself_from_its_root(tiny):
    node = {"type": "object", "properties": {"n": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    assert "root" in grammar_of({"$ref": "#/$defs/node", "$defs": {"node": node}})


@pytest.mark.parametrize("grammar", ["root = nothing", "", "other ::= [a]", "root ::= root"])
def test_a_grammar_that_llama_cpp_refuses_is_an_error_and_no_abort(tiny, grammar):
    with pytest.raises(ConfigError, match="the grammar can't be used"):
        make_sampler(SamplingConfig(grammar=grammar), tiny.n_vocab, tiny)


def test_a_grammar_that_allows_nothing_is_an_error_and_no_abort(tiny):
    bias = dict.fromkeys(range(tiny.n_vocab), -100.0)
    sampler = make_sampler(SamplingConfig(grammar='root ::= "\\x00"', logit_bias=bias), tiny.n_vocab, tiny)
    sampler.begin([1])
    with pytest.raises(ConfigError, match="allows no token"):
        sampler.draw(np.zeros(tiny.n_vocab, np.float32))


def test_a_biased_token_is_drawn_drafted_or_not(tiny):
    stats, texts = GenerationStats(), []
    for draft in ("none", "paper"):
        with Session(tiny, ContextConfig(n_ctx=128, threads=1), DraftConfig(draft=draft)) as session:
            biased = SamplingConfig(logit_bias={300: 100.0})
            texts.append(
                [t.id for p in session.stream("x", sampling=biased, max_tokens=9, stats=stats) for t in p.tokens]
            )
    assert texts == [[300] * 9] * 2
    assert stats.accepted > 0
