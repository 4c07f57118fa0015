from __future__ import annotations

import pytest

from racer_local.errors import ConfigError, ModelError
from racer_local.llama import render_chat
from racer_local.llama.chat import _unused_character


def spelled(model, tokens):
    return b"".join(model.piece(t, special=True) for t in tokens).decode()


def user(text):
    return [{"role": "user", "content": text}]


def test_the_chat_template_of_the_file_is_rendered(tiny):
    tokens = render_chat(tiny, [{"role": "system", "content": "Be brief."}, *user("Hello")])
    assert spelled(tiny, tokens).replace(" ", "") == "<s>system:Bebrief.</s>\nuser:Hello</s>\nassistant:"
    assert tokens[0] == 1, "the template's own <s> is the control token"


@pytest.mark.parametrize("text", ["end </s> of", "</s>", "<s></s><s>", "</</s>s>", "a </s", "<unk> </s>\ue000</s>"])
def test_a_control_tokens_spelling_in_a_message_stays_text(tiny, text):
    plain = render_chat(tiny, user("x"))
    tokens = render_chat(tiny, user(text))
    for control in (0, 1, 2):
        assert tokens.count(control) == plain.count(control)
    assert text.replace(" ", "") in spelled(tiny, tokens).replace(" ", "")


def test_a_broken_spelling_gets_no_space_that_was_not_there(tiny):
    def inside(text):
        return spelled(tiny, render_chat(tiny, user(text))).split("user: ")[1]

    assert inside("a</s>b").startswith("a</s>b</s>")


@pytest.mark.parametrize("message", [{"role": "user", "content": None}, {"role": "user"}])
def test_a_message_without_text_is_refused(tiny, message):
    with pytest.raises(ConfigError, match="must have text as its content"):
        render_chat(tiny, [message])


@pytest.mark.parametrize("token", [-1, 320, 999_999])
def test_a_token_that_is_not_in_the_vocabulary_is_an_error_and_no_abort(tiny, token):
    with pytest.raises(ConfigError, match="is not in the vocabulary of tiny"):
        tiny.piece(token)


def test_tokenizing_text_never_makes_control_tokens_unless_asked(tiny):
    assert 2 not in tiny.tokenize("</s>")
    assert tiny.tokenize("</s>", parse_special=True)[-1] == 2


@pytest.mark.parametrize("text", ["", "hello", "日本語 🎉", "\x00\x01", "a" * 5000, "\ud800"])
def test_any_text_can_be_tokenized_and_comes_back(tiny, text):
    tokens = tiny.tokenize(text)
    joined = b"".join(tiny.piece(t) for t in tokens)
    if "\ud800" not in text:
        assert joined.decode().strip() == text.strip()


def test_pieces_of_control_tokens_are_empty_unless_asked(tiny):
    assert tiny.piece(2) == b""
    assert tiny.piece(2, special=True) == b"</s>"
    assert tiny.eos == "</s>"
    assert tiny.bos == "<s>"
    assert tiny.end_tokens == {2}


def test_the_mark_is_a_character_that_no_message_holds():
    assert _unused_character(["\ue000", "\ue001"]) == "\ue002"


def test_a_template_that_refuses_the_messages_is_one_line(tiny, monkeypatch):
    monkeypatch.setattr(type(tiny), "chat_template", property(lambda self: "{{ raise_exception('no system role') }}"))
    with pytest.raises(ModelError, match=r"refuses these messages \(no system role\).*--raw"):
        render_chat(tiny, user("x"))


def test_a_model_without_a_template_says_to_use_the_raw_prompt(tiny, monkeypatch):
    monkeypatch.setattr(type(tiny), "chat_template", property(lambda self: None))
    with pytest.raises(ModelError, match="carries no chat template; use the raw prompt"):
        render_chat(tiny, user("x"))
