"""What the page keeps: conversations, tabs, files; and what a hostile answer or file can't do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pages
import pytest
from page_mock import Answer
from pages import ATTACKS, RICH, Visitor, ask, done, eventually, expect, kept, said

browser, mock, page, visitor = pages.browser, pages.mock, pages.page, pages.visitor


def test_conversations_survive_a_reload_and_are_listed_renamed_and_deleted(page, mock):
    ask(page, "About cats")
    done(page)
    page.get_by_role("button", name="New chat").click()
    ask(page, "About dogs")
    done(page)
    expect(page.locator("#list .open")).to_have_text(["About dogs", "About cats"])
    page.reload()
    expect(page.locator("article.mine .body")).to_have_text("About dogs")
    page.get_by_role("button", name="About cats", exact=True).click()
    expect(page.locator("article.mine .body")).to_have_text("About cats")
    page.get_by_role("button", name="Rename About cats").click()
    page.keyboard.type("Felines")
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("Felines")
    page.get_by_role("button", name="Delete Felines").click()
    expect(page.locator("#list .open")).to_have_text(["About dogs"])
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("article.mine .body")).to_have_text("About cats")
    page.get_by_role("button", name="Delete Felines").click()
    expect(page.locator("#list .open")).to_have_text(["About dogs"])
    page.reload()
    expect(page.locator("#list .open")).to_have_text(["About dogs"])


def test_a_reload_in_the_middle_of_an_answer_keeps_what_was_said_a_second_before(page, mock):
    answer = Answer("One two three four five six seven eight.", hold=2)
    mock.script.append(answer)
    ask(page, "Count")
    expect(said(page)).to_contain_text("One two")
    eventually(
        page, lambda: len(kept(page)[0]["messages"]) == 2 and "One two" in kept(page)[0]["messages"][1]["content"], 2
    )
    page.reload()
    expect(said(page)).to_contain_text("One two")
    expect(page.locator(".end")).to_have_text("Interrupted by a reload.")
    page.get_by_role("button", name="Answer again").click()
    expect(said(page)).to_have_text("Hello there.")


def test_unsent_text_survives_a_reload(page):
    page.locator("#text").fill("Half a thought")
    page.reload()
    expect(page.locator("#text")).to_have_value("Half a thought")


def test_two_tabs_do_not_lose_each_others_conversations(visitor, page, mock):
    other = visitor.open()
    ask(page, "From the first tab")
    done(page)
    expect(other.locator("#list .open")).to_have_text(["From the first tab"])
    ask(other, "From the second tab")
    done(other)
    expect(page.locator("#list .open")).to_have_text(["From the second tab", "From the first tab"])
    other.get_by_role("button", name="From the first tab", exact=True).click()
    hold = Answer("Slowly said.", hold=1)
    mock.script += [hold, Answer("Quickly said.")]
    ask(page, "And slowly?")
    eventually(page, lambda: len(mock.bodies) == 3)
    ask(other, "And quickly?")
    done(other)
    hold.release.set()
    done(page)
    eventually(page, lambda: len(kept(page)) == 3)
    texts = {message["content"] for chat in kept(page) for message in chat["messages"]}
    assert {"And slowly?", "Slowly said.", "And quickly?", "Quickly said."} <= texts


def test_a_conversation_goes_on_in_the_background_while_another_is_read(page, mock):
    answer = Answer("One two three four five six seven eight.", hold=2)
    mock.script.append(answer)
    ask(page, "First")
    expect(said(page)).to_contain_text("One")
    page.get_by_role("button", name="New chat").click()
    ask(page, "Second")
    expect(said(page)).to_have_text("Hello there.")
    answer.release.set()
    page.get_by_role("button", name="First", exact=True).click()
    expect(said(page)).to_have_text("One two three four five six seven eight.")


def test_the_chat_goes_on_where_the_browser_keeps_nothing(visitor, mock):
    visitor.context.add_init_script(
        "IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError'); }"
    )
    page = visitor.open()
    ask(page, "One")
    expect(said(page)).to_have_text("Hello there.")
    expect(page.locator("#notice span")).to_contain_text("QuotaExceededError")
    page.get_by_role("button", name="New chat").click()
    ask(page, "Two")
    done(page)
    page.get_by_role("button", name="One", exact=True).click()
    expect(page.locator("article.mine .body")).to_have_text("One")


def test_what_is_exported_can_be_imported_elsewhere_and_again(visitor, page, browser, mock, tmp_path):
    mock.script.append(Answer(RICH))
    ask(page, "About lists")
    done(page)
    page.get_by_role("button", name="New chat").click()
    ask(page, "About maps")
    done(page)
    with page.expect_download() as one:
        page.get_by_role("button", name="Export chat").click()
    with page.expect_download() as everything:
        page.get_by_role("button", name="Export all").click()
    assert one.value.suggested_filename == "About maps.json"
    assert len(json.loads(Path(one.value.path()).read_text(encoding="utf-8"))["conversations"]) == 1
    file = tmp_path / "chats.json"
    everything.value.save_as(file)
    page.locator("#file").set_input_files(file)
    expect(page.locator("#notice span")).to_have_text("All of chats.json is here already.")
    expect(page.locator("#list .open")).to_have_count(2)
    elsewhere = Visitor(browser, mock)
    there = elsewhere.open()
    there.locator("#file").set_input_files(file)
    expect(there.locator("#notice span")).to_have_text("Imported 2 conversations.")
    there.get_by_role("button", name="About lists", exact=True).click()
    expect(said(there).locator(".from-corpus").first).to_be_visible()
    expect(there.locator(".numbers summary")).to_contain_text("MAT")
    elsewhere.context.close()
    assert not elsewhere.wrong


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "it is no JSON"),
        ('{"a": 1}', "it is no export of this page"),
        ('{"format": "racer_local.chats", "conversations": [{"messages": [{"role": 1}]}]}', "a message without"),
    ],
)
def test_a_file_that_cannot_be_imported_changes_nothing(page, tmp_path, content, reason):
    ask(page, "Mine")
    done(page)
    file = tmp_path / "bad.json"
    file.write_text(content)
    page.locator("#file").set_input_files(file)
    expect(page.locator("#notice span")).to_contain_text(f"Nothing was imported from bad.json: {reason}")
    assert [chat["title"] for chat in kept(page)] == ["Mine"]


# Nobody vouches for the text ----------------------------------------------------------------------------------------


def harmless(page):
    found = page.evaluate("""() => ({
        pwned: window.pwned ?? null,
        bad: document.querySelectorAll("article :is(script, img, svg:not(.plot), iframe, style, object)").length,
        handlers: [...document.querySelectorAll("article *")]
            .filter((element) => [...element.attributes].some((one) => /^on/i.test(one.name))).length,
        links: [...document.querySelectorAll("article a[href]")].map((a) => [a.getAttribute("href"), a.rel, a.target]),
    })""")
    assert (found["pwned"], found["bad"], found["handlers"]) == (None, 0, 0)
    assert all(re.match(r"https?:", href) for href, _, _ in found["links"])
    assert all(("noopener" in rel, target) == (True, "_blank") for _, rel, target in found["links"])
    return found["links"]


def test_an_answer_can_run_nothing_and_load_nothing(page, mock):
    mock.script.append(Answer(ATTACKS))
    ask(page, ATTACKS)
    done(page)
    links = harmless(page)
    for address in ("https://example.org/", "http://192.0.2.1/track.png"):
        assert [address, "noopener noreferrer", "_blank"] in links
    expect(said(page)).to_contain_text("<script>window.pwned = 1</script>")
    for link in page.locator("article.answer a:not([href])").all():
        link.click()
    harmless(page)


def test_an_imported_file_can_run_nothing(page, tmp_path):
    answer = {"role": "assistant", "content": ATTACKS, "marks": "1c<img>", "finish": "constructor"}
    answer["stats"] = {"tokens_per_second": "<img src=x onerror=window.pwned=1>", "emitted": 3, "steps": {"a": 1}}
    title = "<img src=x onerror='window.pwned=1'>"
    chat = {"id": "../<b>", "title": title, "system": [], "messages": [{"role": "user", "content": ATTACKS}, answer]}
    file = tmp_path / "evil.json"
    file.write_text(json.dumps({"format": "racer_local.chats", "version": 1, "conversations": [chat]}))
    page.locator("#file").set_input_files(file)
    expect(page.locator("#title")).to_have_text(title)
    expect(said(page)).to_contain_text("window.pwned")
    harmless(page)
    assert page.locator("nav img").count() == 0


def test_an_answer_that_is_had_again_is_not_lost_where_the_page_ends_before_the_new_one_begins(page, mock):
    ask(page)
    done(page)
    before = said(page).inner_text()
    late = Answer("Something else.", hold=0)
    mock.script.append(late)
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator("#stop")).to_be_visible()
    page.reload()
    expect(said(page)).to_have_text(before)
    late.release.set()


def test_another_conversation_is_not_opened_over_an_unfinished_edit_unasked(page):
    ask(page)
    done(page)
    page.get_by_role("button", name="Edit").first.click()
    page.locator(".editor textarea").fill("something else")
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".editor textarea")).to_have_value("something else")
