"""What a `racer` argument may be, what exactness chooses for a context, and the flags of both."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from racer_local.cli import build_parser
from racer_local.cli.options import context_from_args, from_args
from racer_local.config import DRAFTERS, ContextConfig, DraftConfig, SamplingConfig
from racer_local.errors import ConfigError

ALL = ", ".join(setting.name for setting in fields(DraftConfig))


@pytest.mark.parametrize(
    ("value", "config"),
    [
        (None, DraftConfig()),
        (True, DraftConfig()),
        (False, DraftConfig(draft="none")),
        ({}, DraftConfig()),
        ({"exact": True}, DraftConfig(exact=True)),
        ({"draft": "lookup", "max_nodes": 5}, DraftConfig(draft="lookup", max_nodes=5)),
        ({"max_nodes": None}, DraftConfig()),
        ({"fade": 1, "caution": 0.25}, DraftConfig(fade=1, caution=0.25)),
        ({name: getattr(DraftConfig(), name) for name in ALL.split(", ")}, DraftConfig()),
        (DraftConfig(draft="paper", exact=True), DraftConfig(draft="paper", exact=True)),
    ],
    ids=repr,
)
def test_a_racer_argument_may_be_a_bool_nothing_settings_or_a_config(value, config):
    assert DraftConfig.of(value) == config


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"drat": "paper"}, f"racer has no setting 'drat'; known: {ALL}"),
        ({"draft": "paper", "Exact": True}, f"racer has no setting 'Exact'; known: {ALL}"),
        ({"nodes": 8}, f"racer has no setting 'nodes'; known: {ALL}"),
        ({"with_keys": 8}, f"racer has no setting 'with_keys'; known: {ALL}"),
        ({1: 8}, f"racer has no setting 1; known: {ALL}"),
        ({"max_nodes": True}, "racer's max_nodes is True; it must be of type int | None"),
        ({"max_nodes": "8"}, "racer's max_nodes is '8'; it must be of type int | None"),
        ({"max_nodes": 8.0}, "racer's max_nodes is 8.0; it must be of type int | None"),
        ({"exact": 1}, "racer's exact is 1; it must be of type bool"),
        ({"exact": None}, "racer's exact is None; it must be of type bool"),
        ({"exact": "yes"}, "racer's exact is 'yes'; it must be of type bool"),
        ({"draft": None}, "racer's draft is None; it must be of type str"),
        ({"draft": ["paper"]}, "racer's draft is ['paper']; it must be of type str"),
        ({"breadth": True}, "racer's breadth is True; it must be of type int"),
        ({"fade": True}, "racer's fade is True; it must be of type float"),
        ({"fade": "1"}, "racer's fade is '1'; it must be of type float"),
        ({"fade": float("nan")}, "fade is nan; it must be from 0 to 1"),
        ({"max_nodes": 0}, "max_nodes is 0; it must be from 1 to 255 (the root counts)"),
        ({"max_nodes": 256}, "max_nodes is 256; it must be from 1 to 255 (the root counts)"),
        ({"draft": "bigram"}, f"draft is 'bigram'; it must be one of {', '.join(DRAFTERS)}"),
        *((value, f"racer is {value!r}; it must be True, False, a DraftConfig or a dict") for value in (0, 1, 1.0)),
        *((value, f"racer is {value!r}; it must be True, False, a DraftConfig or a dict") for value in ("on", [], ())),
        ([("exact", True)], "racer is [('exact', True)]; it must be True, False, a DraftConfig or a dict"),
    ],
    ids=repr,
)
def test_anything_else_is_refused_in_one_line_that_names_it(value, message):
    with pytest.raises(ConfigError) as error:
        DraftConfig.of(value)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_keys_change_what_they_name_and_nothing_else():
    before = DraftConfig(draft="paper", ngram=6, exact=True)
    assert before.with_keys({"max_nodes": 8}) == DraftConfig(draft="paper", ngram=6, exact=True, max_nodes=8)
    assert before.with_keys({}) == before == DraftConfig(draft="paper", ngram=6, exact=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ngram": 5}, "racer has no setting 'ngram' while it is open; known: draft, exact"),
        ({"gram": 5}, "racer has no setting 'gram'; known: draft, exact"),
        ({"draft": "paper", "ngram": 5}, "racer has no setting 'ngram' while it is open; known: draft, exact"),
    ],
    ids=repr,
)
def test_only_allowed_keys_can_change(changes, message):
    with pytest.raises(ConfigError) as error:
        DraftConfig().with_keys(changes, ("draft", "exact"))
    assert str(error.value) == message
    assert DraftConfig().with_keys({"exact": True}, ("draft", "exact")).exact


@pytest.mark.parametrize(
    ("given", "flash_attn", "kv_type", "equal"),
    [
        ({}, "on", "bf16", True),
        ({"flash_attn": "auto"}, "on", "bf16", True),
        ({"flash_attn": "on"}, "on", "bf16", True),
        ({"flash_attn": "off"}, "off", "bf16", False),
        ({"kv_type": "f16"}, "on", "f16", False),
        ({"kv_type": "f32"}, "on", "f32", False),
        ({"kv_type": "q8_0"}, "on", "q8_0", True),
        ({"kv_type": "bf16"}, "on", "bf16", True),
        ({"flash_attn": "off", "kv_type": "f16"}, "off", "f16", False),
    ],
    ids=repr,
)
def test_exactness_chooses_what_is_left_open_and_leaves_what_is_set(given, flash_attn, kv_type, equal):
    rest = {"n_ctx": 777, "n_batch": 33, "threads": 3, "options": {"rope_freq_base": 5.0}}
    before = ContextConfig(**given, **rest)
    assert before.for_exact() == ContextConfig(flash_attn=flash_attn, kv_type=kv_type, **rest)
    assert before.for_exact().for_exact() == before.for_exact()
    assert before.for_exact().batch_equals_single is equal
    assert before == ContextConfig(**given, **rest)


def parsed(*flags):
    return build_parser().parse_args(["generate", "-m", "tiny", "-p", "hello", *flags])


def test_the_exact_flag_is_off_unless_it_is_given():
    assert from_args(DraftConfig, parsed()) == DraftConfig()
    assert from_args(DraftConfig, parsed("--exact")) == DraftConfig(exact=True)
    flags = ("--exact", "--draft", "paper", "--max-nodes", "8")
    assert from_args(DraftConfig, parsed(*flags)) == DraftConfig(draft="paper", max_nodes=8, exact=True)


def test_the_exact_flag_takes_no_value_and_leaves_the_other_settings_open(capsys):
    args = parsed("--exact")
    assert context_from_args(args) == ContextConfig()
    assert from_args(SamplingConfig, args) == SamplingConfig()
    with pytest.raises(SystemExit):
        parsed("--exact", "yes")
    assert "unrecognized arguments: yes" in capsys.readouterr().err


def test_a_kv_type_that_is_left_out_stays_open():
    """So that exactness can tell what the user chose from what is only the default."""
    assert context_from_args(parsed()).kv_type is None
    assert context_from_args(parsed("--kv-type", "f16")).kv_type == "f16"


def test_the_help_says_what_exact_does(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        parsed("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--exact the token ids of plain decoding, to the bit" in text
    assert "default: f16, with --exact on a CPU bf16" in text


@pytest.mark.parametrize("corpora", ["my.index", None, 3, [""], [3], {"my.index"}])
def test_what_is_no_list_of_files_is_refused_in_one_line(corpora):
    with pytest.raises(ConfigError, match=r"corpora \(--corpus\) is .*must be") as error:
        DraftConfig(corpora=corpora)
    assert "\n" not in str(error.value)


def test_files_of_indexes_are_texts_or_paths():
    assert DraftConfig(corpora=[Path("a.index"), "b.index"]).corpora == ("a.index", "b.index")
    assert DraftConfig(remember=Path("own.index")).remember == "own.index"
