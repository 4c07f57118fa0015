"""Chatting on the page, against a server that plays a script."""

from __future__ import annotations

import re

import pages
import pytest
from page_mock import Answer, Refusal, pieces_of
from pages import RICH, ask, done, expect, said

browser, mock, page, visitor = pages.browser, pages.mock, pages.page, pages.visitor

# Sending, streaming, stopping ---------------------------------------------------------------------------------------


def test_a_message_is_answered_with_the_speeds_beside_it_and_a_plot(page, mock):
    text = "One two three four five six seven eight nine ten."
    mock.script.append(Answer(text))
    ask(page, "Count.")
    expect(said(page)).to_have_text(text)
    done(page)
    expect(page.locator(".numbers summary")).to_have_text(
        re.compile(r"^\d+\.\d tokens/s · MAT \d\.\d\d · plain about 19\.8$")
    )
    assert page.locator(".plot path").get_attribute("d").count("M") == sum(
        source is None for _, source in pieces_of(text)
    )
    page.locator(".numbers summary").click()
    expect(page.locator(".numbers p")).to_contain_text("drafted tokens accepted")
    body = mock.bodies[-1]
    assert body["messages"] == [{"role": "user", "content": "Count."}]
    assert body["stream"] is True
    assert body["racer"] == {"sources": True}
    assert not {"temperature", "top_p", "max_tokens", "stop", "seed"} & set(body)
    expect(page.locator("#list .open")).to_have_text("Count.")
    expect(page.locator("#say")).to_have_text("The answer is complete.")


def test_text_grows_before_the_end_and_is_no_live_region(page, mock):
    answer = Answer("One two three four five six seven eight nine ten.", hold=2)
    mock.script.append(answer)
    ask(page)
    expect(said(page)).to_contain_text("One two")
    expect(page.locator(".numbers summary")).to_contain_text("MAT")
    assert "ten" not in said(page).text_content()
    assert page.evaluate("!document.querySelector('#messages').closest('[aria-live], [role=log], [role=status]')")
    answer.release.set()
    expect(said(page)).to_contain_text("nine ten.")


def test_stop_keeps_what_was_said(page, mock):
    mock.script.append(Answer("word " * 400, pause=0.05))
    ask(page)
    expect(said(page)).to_contain_text("word word")
    page.locator("#stop").click()
    expect(page.locator(".end")).to_have_text("Stopped.")
    assert said(page).text_content().startswith("word word")
    assert mock.broken.wait(5)
    page.reload()
    expect(said(page)).to_contain_text("word word")


def test_an_answer_can_be_had_again_and_comes_back_where_the_new_one_fails(page, mock):
    mock.script += [Answer("First."), Answer("Second."), Refusal(500, "The model fell over.")]
    ask(page)
    expect(said(page)).to_have_text("First.")
    page.get_by_role("button", name="Answer again").click()
    expect(said(page)).to_have_text("Second.")
    done(page)
    assert mock.bodies[0]["messages"] == mock.bodies[1]["messages"]
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator("#failure")).to_contain_text("The model fell over.")
    expect(said(page)).to_have_text("Second.")
    expect(page.locator("article")).to_have_count(2)


def test_editing_a_message_cuts_the_conversation_there_and_asks_anew(page, mock):
    for text in ("one", "two"):
        ask(page, text)
        done(page)
    first = page.locator("article.mine").first
    first.hover()
    first.get_by_role("button", name="Edit").click()
    expect(first.locator("textarea")).to_be_focused()
    first.locator("textarea").fill("uno")
    first.locator("textarea").press("Enter")
    expect(page.locator("article.mine")).to_have_count(1)
    done(page)
    assert mock.bodies[-1]["messages"] == [{"role": "user", "content": "uno"}]


def test_an_answer_is_edited_in_place_and_sent_along_as_edited(page, mock):
    ask(page)
    done(page)
    answer = page.locator("article.answer")
    answer.get_by_role("button", name="Edit").click()
    answer.locator("textarea").fill("I said **this**.")
    answer.get_by_role("button", name="Save").click()
    expect(said(page)).to_have_text("I said this.")
    expect(answer.locator("[class^=from-]")).to_have_count(0)
    ask(page, "More")
    done(page)
    assert mock.bodies[-1]["messages"][1] == {"role": "assistant", "content": "I said **this**."}


def test_settings_go_with_the_request_and_survive_a_reload(visitor, mock):
    mock.models, mock.corpora = ("small", "large"), ("notes", "code")
    page = visitor.open()
    page.locator("#show-settings").click()
    values = {"temperature": "0.2", "top_p": "0.9", "top_k": "20", "min_p": "0.1", "repeat_penalty": "1.1"}
    values |= {"max_tokens": "64", "seed": "7", "stop": "END\n\\n\\n", "system": "Be brief."}
    for name, value in values.items():
        page.locator(f"#options [name={name}]").fill(value)
    page.get_by_label("code").check()
    page.get_by_label("Draft tokens with racer").uncheck()
    page.get_by_label("Model").select_option("large")
    ask(page)
    done(page)
    body = mock.bodies[-1]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["model"] == "large"
    assert body["racer"] == {"draft": "none", "sources": True}
    sent = {name: body[name] for name in values if name in body}
    numbers = {"temperature": 0.2, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repeat_penalty": 1.1}
    assert sent == numbers | {"max_tokens": 64, "seed": 7, "stop": ["END", "\n\n"]}
    page.reload()
    ask(page)
    done(page)
    assert mock.bodies[-1]["temperature"] == 0.2
    assert mock.bodies[-1]["messages"][0]["content"] == "Be brief."
    assert mock.bodies[-1]["model"] == "large"


def test_code_and_answers_are_copied_as_they_were_written(page, mock):
    mock.script.append(Answer(RICH))
    ask(page)
    done(page)
    page.get_by_role("button", name="Copy code").click()
    expect(page.locator(".copy-code")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()").startswith("def merge(left: list[int]")
    page.locator("article.answer .copy-message").click()
    expect(page.locator("article.answer .copy-message")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == RICH


# What goes wrong ----------------------------------------------------------------------------------------------------


def test_a_refused_request_says_one_line_and_can_be_retried(page, mock):
    mock.script.append(Refusal(429, "The server is busy.", headers={"Retry-After": "3"}))
    ask(page, "My long question")
    expect(page.locator("#failure span")).to_have_text("The server is busy. It asks to wait 3 s.")
    expect(page.locator("article.mine .body")).to_have_text("My long question")
    page.get_by_role("button", name="Retry").click()
    expect(said(page)).to_have_text("Hello there.")
    expect(page.locator("#failure")).to_be_hidden()


def test_a_conversation_too_long_says_what_to_do_instead_of_retrying(page, mock):
    mock.script.append(Refusal(400, "9000 tokens do not fit in 4096.", "context_length_exceeded"))
    ask(page)
    expect(page.locator("#failure")).to_have_text(
        "9000 tokens do not fit in 4096. Shorten a message or start a new chat."
    )
    expect(page.get_by_role("button", name="Retry")).to_have_count(0)


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (Answer("One two three four.", error="The model ran out of memory."), "The model ran out of memory."),
        (Answer("One two three four.", drop=True), "The connection ended before the answer did."),
    ],
)
def test_an_answer_that_breaks_off_keeps_its_text_and_can_be_retried(page, mock, answer, line):
    mock.script.append(answer)
    ask(page)
    expect(page.locator("#failure span")).to_have_text(line)
    expect(said(page)).to_have_text("One two three four.")
    page.get_by_role("button", name="Retry").click()
    expect(said(page)).to_have_text("Hello there.")


def test_a_server_that_is_gone_loses_no_text(page, visitor, mock):
    mock.expected.add("Failed to load resource: net::ERR_FAILED")
    visitor.context.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "Are you there?")
    expect(page.locator("#failure span")).to_have_text("The server does not answer.")
    visitor.context.unroute("**/v1/chat/completions")
    page.reload()
    expect(page.locator("#failure span")).to_have_text("Not answered yet.")
    page.get_by_role("button", name="Answer").click()
    expect(said(page)).to_have_text("Hello there.")


def test_a_key_is_asked_for_and_remembered_only_if_told_to(visitor, mock):
    mock.key = "open-sesame"
    page = visitor.open()
    page.locator("#key-text").fill("wrong-key")
    page.locator("#key-text").press("Enter")
    expect(page.locator("#key-line")).to_have_text("The server refused the last one.")
    page.locator("#key-text").fill("open-sesame")
    page.locator("#key-text").press("Enter")
    expect(page.locator("#model-name")).to_have_text("smollm2-135m")
    ask(page)
    expect(said(page)).to_have_text("Hello there.")
    assert page.evaluate("[localStorage['racer_local.key'], sessionStorage['racer_local.key']]") == [
        None,
        "open-sesame",
    ]
    page.evaluate("sessionStorage.clear()")
    page.reload()
    page.locator("#key-text").fill("open-sesame")
    page.locator("#key-remember").check()
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#model-name")).to_have_text("smollm2-135m")
    assert page.evaluate("[localStorage['racer_local.key'], sessionStorage['racer_local.key']]") == [
        "open-sesame",
        None,
    ]
    mock.key = "changed"
    ask(page, "Still there?")
    page.locator("#key-cancel").click()
    expect(page.locator("#failure span")).to_have_text("The server needs a key.")


def test_a_loading_model_is_waited_for(visitor, mock):
    mock.loading = 1
    page = visitor.open()
    expect(page.locator("#notice span")).to_have_text("Loading the model …")
    expect(page.locator("#model-name")).to_have_text("smollm2-135m")
    expect(page.locator("#notice")).to_be_hidden()
    mock.loading = 1
    ask(page)
    expect(page.locator("#notice span")).to_have_text("Loading the model …")
    expect(said(page)).to_have_text("Hello there.")
    before = len(mock.paths)
    page.wait_for_timeout(1200)
    assert len(mock.paths) == before  # nothing is polled when all is well


def test_why_nothing_is_drafted_is_told(page, mock):
    mock.script.append(Answer("Hello there.", disabled="This model cannot be drafted for.", finish="length"))
    ask(page)
    expect(page.locator(".end")).to_have_text("Cut off at the token limit. This model cannot be drafted for.")


# What is kept -------------------------------------------------------------------------------------------------------
