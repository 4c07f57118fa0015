"""The page at /, in a real browser: against a server that plays a script (page_mock), and once against ours."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from page_mock import Answer, Refusal, mock_server, pieces_of

playwright_api = pytest.importorskip("playwright.sync_api", reason="the page's tests need `pip install playwright`")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("the page's tests need a Chromium (apt install chromium)", allow_module_level=True)
expect = playwright_api.expect

RICH = """\
Here is a function that merges two sorted lists in **linear time**, without changing either of them:

```python
def merge(left: list[int], right: list[int]) -> list[int]:
    \"\"\"Merge two sorted lists into a new sorted one.\"\"\"
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]
```

1. It looks at each element *once*, so it takes O(n + m) comparisons.
2. `sorted` finds the two runs by itself (Timsort), and it is written in C.
   - For lists of a few thousand numbers it is therefore **faster in practice**.

| n | `merge` | `sorted` |
| --- | ---: | ---: |
| 1 000 | 0.14 ms | 0.02 ms |
| 100 000 | 15.1 ms | 1.9 ms |

> Measure before you replace a built-in function.

The [documentation](https://docs.python.org/3/library/heapq.html) of `heapq.merge` has a lazy one.
"""


@pytest.fixture(scope="module")
def browser():
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def mock():
    with mock_server() as mock:
        yield mock


class Visitor:
    """A browser context that notes whatever went wrong in it."""

    def __init__(self, browser, mock, **options):
        self.mock, self.wrong = mock, []
        self.context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], **options)
        self.context.set_default_timeout(8000)
        self.context.on("request", self.watch)
        self.context.on("page", self.listen)

    def watch(self, request):
        if not request.url.startswith((self.mock.url, "data:", "blob:")):
            self.wrong.append(f"request to {request.url}")

    def listen(self, page):
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("console", self.hear)

    def hear(self, message):
        refused = re.fullmatch(r"Failed to load resource: the server responded with a status of (\d+) .*", message.text)
        deliberate = refused and int(refused[1]) in self.mock.refused
        if message.type in ("error", "warning") and not deliberate and message.text not in self.mock.expected:
            self.wrong.append(f"console: {message.text}")

    def open(self, path="/"):
        page = self.context.new_page()
        page.goto(self.mock.url + path)
        expect(page.locator("#model-name, #model:not([hidden])").first).to_be_attached()
        return page


@pytest.fixture
def visitor(browser, mock):
    visitor = Visitor(browser, mock, viewport={"width": 1280, "height": 800})
    yield visitor
    visitor.context.close()
    assert not visitor.wrong


@pytest.fixture
def page(visitor):
    return visitor.open()


def ask(page, text="Hi"):
    page.locator("#text").fill(text)
    page.locator("#text").press("Enter")


def said(page):
    return page.locator("article.answer .body").last


def done(page):
    expect(page.locator("#send")).to_be_visible()


def kept(page):
    """All conversations as the browser keeps them."""
    return page.evaluate("""() => new Promise((resolve) => {
        const request = indexedDB.open("racer_local", 1);
        request.onsuccess = () => {
            const all = request.result.transaction("chats").objectStore("chats").getAll();
            all.onsuccess = () => { request.result.close(); resolve(all.result); };
        };
    })""")


def eventually(page, condition, seconds=5):
    for _ in range(seconds * 20):
        if condition():
            return
        page.wait_for_timeout(50)
    pytest.fail("it never came to be")


@pytest.fixture(scope="module")
def modules(browser):
    """A page whose modules are called directly; nothing is said on it."""
    with mock_server() as mock:
        visitor = Visitor(browser, mock)
        yield visitor.open()
        visitor.context.close()
        assert not visitor.wrong


def rendered(page, text, pieces=None):
    """An answer as the page's own modules render it, shaded where its pieces are given."""
    return page.evaluate(
        """async ([text, pieces]) => {
            const { render } = await import("/page/render.js");
            const { marksOf } = await import("/page/shade.js");
            const box = document.createElement("div");
            box.append(render(text, pieces && marksOf(text, pieces)));
            const spans = [...box.querySelectorAll("[class^=from-]")].map((s) => [s.className.slice(5), s.textContent]);
            return { text: box.textContent, html: box.innerHTML, spans };
        }""",
        [text, pieces],
    )


def spans_of(page, pieces):
    """What is shaded where an answer came in these pieces: [source, text] in order."""
    return rendered(page, "".join(piece for piece, _ in pieces), pieces)["spans"]


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
    assert body["racer"] == {"draft": "racer", "sources": True}
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
    assert body["racer"] == {"draft": "none", "sources": True, "corpora": ["code"]}
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
    mock.key = "sesame"
    page = visitor.open()
    page.locator("#key-text").fill("wrong")
    page.locator("#key-text").press("Enter")
    expect(page.locator("#key-line")).to_have_text("The server refused the last one.")
    page.locator("#key-text").fill("sesame")
    page.locator("#key-text").press("Enter")
    expect(page.locator("#model-name")).to_have_text("smollm2-135m")
    ask(page)
    expect(said(page)).to_have_text("Hello there.")
    assert page.evaluate("[localStorage['racer_local.key'], sessionStorage['racer_local.key']]") == [None, "sesame"]
    page.evaluate("sessionStorage.clear()")
    page.reload()
    page.locator("#key-text").fill("sesame")
    page.locator("#key-remember").check()
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#model-name")).to_have_text("smollm2-135m")
    assert page.evaluate("[localStorage['racer_local.key'], sessionStorage['racer_local.key']]") == ["sesame", None]
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

ATTACKS = """\
<script>window.pwned = 1</script>
<img src=x onerror="window.pwned = 1">
<svg onload="window.pwned = 1"><a xlink:href="javascript:window.pwned=1">x</a></svg>

[a link](javascript:window.pwned=1) and [another](data:text/html,<script>window.pwned=1</script>)
![picture](http://192.0.2.1/track.png) ![x](x" onerror="window.pwned=1)

```"><img src=x onerror=window.pwned=1>
code
```

<style>body { display: none }</style> [good](https://example.org/ "title") <javascript:alert(1)>
"""


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


# Shading ------------------------------------------------------------------------------------------------------------

TEXTS = {
    "rich": RICH,
    "attacks": ATTACKS,
    "lists": "- a\n- b\n  - c **d** e\n    1. f\n\n* [ ] open\n* [x] done\n\n+ g\n\n  second paragraph\n",
    "fences": "Text\n\n```js\nif (a < b && c) { x(`y`) }\n\n\t// a\n```\n\n    four &lt;\n\n~~~\n```\n~~~\n\n```py\nx",
    "tables": "| a | b |\n|:--|--:|\n| 1 \\| 2 | `x` |\n| **y** | |\n\nafter",
    "emphasis": "**bold** *it* ***both*** ~~gone~~ __b__ _i_ a*b*c **half",
    "entities": "a &lt; b &amp;&amp; c &copy; &#65; &nope; & &amp;lt; x &gt; y and `&lt;` end",
    "cjk": "## 标题\n\n这是**粗体**字，以及`代码`。\n\n- 第一\n- 日本語テキスト\n\n한국어 문장입니다.",
    "emoji": "Hi 👋🏽! **👩‍👩‍👧‍👦 family** 🇩🇪 e\u0301te\u0301 ❤️ `🧪` 🙂🙃",
    "links": "See [the docs](https://example.org/a_(b)) and <https://example.org/x>. ![img](y.png)\n\n[r]: /u\n[r] x",
    "breaks": "one  \ntwo\\\nthree\r\nfour\n\n---\n\n> q1\n> > q2\n\nSetext\n===\n\\*not\\* \\_it\\_",
}


@pytest.mark.parametrize("name", TEXTS)
def test_shading_changes_no_text(modules, name):
    for end in (*range(1, 60, 11), len(TEXTS[name])):  # cut off anywhere, as a stream is
        text = TEXTS[name][:end]
        plain, shaded = rendered(modules, text), rendered(modules, text, pieces_of(text))
        assert shaded["text"] == plain["text"]
        unwrapped = [re.sub(r'</?span( class="(from-\w+|)")?>', "", one["html"]) for one in (plain, shaded)]
        assert unwrapped[0] == unwrapped[1]
    assert len({source for source, _ in shaded["spans"]}) > 1


def test_shading_lies_on_the_words_that_were_drafted(page, mock):
    pieces = [
        ("# Ti", None),
        ("tle", "context"),
        ("\n\nSome **b", None),
        ("old** [li", "logits"),
        ("nk](https://example.org) and", None),
    ]
    pieces += [
        (" `co", "corpus"),
        ("de` a &lt; ", None),
        ("b", "logits"),
        (", c < d", None),
        (" tail end", "context"),
        (".", None),
    ]
    mock.script.append(Answer(pieces=pieces))
    ask(page)
    done(page)
    spans = said(page).locator("[class^=from-]").evaluate_all("all => all.map((s) => [s.className, s.textContent])")
    assert spans == [
        ["from-context", "tle"],
        ["from-logits", "old"],
        ["from-logits", "li"],
        ["from-corpus", "co"],
        ["from-logits", "b"],
        ["from-context", "tail end"],
    ]
    expect(said(page)).to_have_text("Title\nSome bold link and code a < b, c < d tail end.")


def test_most_drafted_words_are_shaded_with_their_own_source(modules):
    """Each word of its own kind of letters by source: a shift of the alignment would show at once."""
    sources = {"context": "ccc", "logits": "lll", "corpus": "ppp", None: "nnn"}
    order = ["context", None, "logits", None, "corpus", "corpus", None, "context", "logits", None] * 12
    glue = ["", "**", "", "\n- ", " `", "` ", "\n\n", " [", "](https://example.org/l/c/p) &lt; ", "\n\n> "]
    pieces = [(glue[i % 10] + sources[source] + " ", source) for i, source in enumerate(order)]
    spans = spans_of(modules, pieces)
    assert len(spans) == 72
    assert [words for source, words in spans if words.strip("< ") != sources[source]] == []


def test_shading_parts_no_emoji(modules):
    family, flag, wave = "👩‍👩‍👧‍👦", "🇩🇪", "👋🏽"
    pieces = [
        ["A ", None],
        [family[:2], "context"],
        [family[2:], None],
        [" ", None],
        [flag[0], None],
        [flag[1], "logits"],
    ]
    pieces += [[" ", None], [wave[0], "corpus"], [wave[1], None], [" e", "context"], ["\u0301.", None]]
    spans = spans_of(modules, pieces)
    assert spans == [["context", family], ["corpus", wave], ["context", "e\u0301"]]


def test_shading_is_told_by_a_legend_and_can_be_switched_off(page, mock):
    mock.script.append(Answer(RICH))
    ask(page)
    done(page)
    before = said(page).text_content()
    expect(said(page).locator(".from-context").first).to_be_visible()
    expect(page.locator("#legend .from-corpus")).to_be_visible()
    page.locator("#show-settings").click()
    page.get_by_label("Shade drafted text").uncheck()
    expect(said(page).locator("[class^=from-]")).to_have_count(0)
    expect(page.locator("#legend .from-corpus")).to_be_hidden()
    assert said(page).text_content() == before
    answer = Answer("One two three four five six.", hold=2)
    mock.script.append(answer)
    ask(page, "More")
    expect(said(page)).to_contain_text("One")
    expect(said(page).locator("[class^=from-]")).to_have_count(0)
    answer.release.set()


# Keys, sizes, colours -----------------------------------------------------------------------------------------------


def focus(page):
    return page.evaluate("(({id, ariaLabel, textContent}) => id || ariaLabel || textContent)(document.activeElement)")


def test_everything_works_by_keyboard_alone(page, mock):
    keys = page.keyboard
    assert focus(page) == "text"
    keys.type("line one")
    keys.press("Shift+Enter")
    keys.type("line two")
    keys.press("Enter")
    expect(said(page)).to_have_text("Hello there.")
    done(page)
    assert mock.bodies[-1]["messages"][0]["content"] == "line one\nline two"

    keys.press("ArrowUp")
    keys.press("Control+a")
    keys.type("changed")
    keys.press("Enter")
    done(page)
    assert mock.bodies[-1]["messages"] == [{"role": "user", "content": "changed"}]
    assert focus(page) == "text"

    mock.script.append(Answer("word " * 300, pause=0.05))
    keys.press("Control+Shift+Enter")
    expect(said(page)).to_contain_text("word word")
    keys.press("Escape")
    expect(page.locator(".end")).to_have_text("Stopped.")

    keys.press("Control+,")
    expect(page.get_by_label("Draft tokens with racer")).to_be_focused()
    keys.press("Space")
    keys.press("Escape")
    assert focus(page) == "text"
    keys.press("Control+/")
    expect(page.locator("#help")).to_be_visible()
    keys.press("Escape")
    expect(page.locator("#help")).to_be_hidden()

    keys.press("Control+Shift+O")
    keys.type("second")
    keys.press("Enter")
    expect(page.locator("#list .open")).to_have_count(2)
    done(page)
    assert mock.bodies[-1]["racer"]["draft"] == "none"
    keys.press("Control+Shift+L")
    assert focus(page) == "second"
    keys.press("F2")
    keys.type("renamed")
    keys.press("Enter")
    expect(page.locator("#list .open").first).to_have_text("renamed")
    assert focus(page) == "renamed"
    keys.press("ArrowDown")
    keys.press("Delete")
    expect(page.locator("#list .open")).to_have_text(["renamed"])

    for _ in range(25):
        keys.press("Shift+Tab")
        if focus(page) == "new":
            break
    seen = []
    while len(seen) < 25:
        seen.append(focus(page))
        assert (
            page.evaluate("getComputedStyle(document.activeElement).outline").endswith("solid 2px")
            or seen[-1] == "text"
        )  # the message box shows it on its frame
        if seen[-1] == "text":
            break
        keys.press("Tab")
    wanted = ["new", "renamed", "export", "export-all", "import", "show-settings", "scroll", "Answer again", "text"]
    assert [name for name in seen if name in wanted] == wanted


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (360, 740)], ids=["desk", "phone"])
def test_it_looks_right_and_fits_in_every_size_and_scheme(browser, mock, tmp_path, size, scheme):
    folder = Path(os.environ.get("RACER_LOCAL_ARTEFACTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    mock.models, mock.corpora = ("smollm2-135m", "qwen2.5-1.5b-instruct-of-a-long-name"), ("notes",)
    visitor = Visitor(browser, mock, viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    page = visitor.open()

    def shoot(name):
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert page.evaluate(
            "document.querySelector('#scroll').scrollWidth <= document.querySelector('#scroll').clientWidth"
        )
        page.screenshot(path=folder / f"page-{name}-{size[0]}-{scheme}.png")

    mock.script += [Answer(RICH), Answer("unbroken" * 40 + " `" + "x" * 300 + "`.")]
    ask(page, "Write a Python function that merges two sorted lists, and compare it with sorted().")
    done(page)
    page.wait_for_timeout(200)
    shoot("chat")
    page.locator("#scroll").evaluate("pane => { pane.scrollTop = 0; }")
    shoot("top")
    ask(page, "And " + "w" * 300)
    done(page)
    shoot("long")
    page.locator("#show-settings").click()
    shoot("settings")
    page.keyboard.press("Escape")
    if size[0] < 800:
        page.locator("#show-chats").click()
        expect(page.locator("#list .open")).to_be_visible()
        shoot("conversations")
        page.keyboard.press("Escape")
        expect(page.locator("#list .open")).to_be_hidden()
    visitor.context.close()
    assert not visitor.wrong


def test_dark_and_light_follow_the_system_until_one_is_chosen(browser, mock):
    visitor = Visitor(browser, mock, color_scheme="dark")
    page = visitor.open()
    light = "getComputedStyle(document.documentElement).backgroundColor === 'rgb(253, 253, 252)'"
    assert not page.evaluate(light)
    page.emulate_media(color_scheme="light")
    assert page.evaluate(light)
    page.locator("#show-settings").click()
    page.get_by_label("theme").select_option("dark")
    assert not page.evaluate(light)
    page.reload()
    assert not page.evaluate(light)
    visitor.context.close()
    assert not visitor.wrong


def test_words_stand_out_from_every_ground(browser, mock):
    """WCAG AA: 4.5 to 1, for text, faint text and links, plain and shaded."""
    for scheme in ("light", "dark"):
        visitor = Visitor(browser, mock, color_scheme=scheme)
        page = visitor.open()
        ratios = page.evaluate("""() => {
            const probe = document.body.appendChild(document.createElement("i"));
            const light = (name) => {
                probe.style.color = `var(--${name})`;
                const [r, g, b] = getComputedStyle(probe).color.match(/[\\d.]+/g).map((v) => v / 255)
                    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
                return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
            };
            const pairs = {};
            for (const ink of ["text", "accent", "faint"]) {
                const tints = ink === "faint" ? [] : ["context", "logits", "corpus"];
                for (const ground of ["ground", "side", "raised", "code", ...tints]) {
                    const [a, b] = [light(ink), light(ground)];
                    pairs[`${ink} on ${ground}`] = Math.max(a, b) / Math.min(a, b);
                }
            }
            return pairs;
        }""")
        assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}
        visitor.context.close()


def test_rendering_a_stream_leaves_the_cores_to_the_model(page, mock):
    """The page draws a stream of 150 chunks a second about seven times a second."""
    page.evaluate("""() => {
        window.draws = 0;
        const watcher = new MutationObserver(() => { window.draws += 1; });
        watcher.observe(document.querySelector("#messages"), { childList: true, subtree: true, characterData: true });
    }""")
    mock.script.append(Answer("word " * 2000, pause=0.006))
    ask(page)
    expect(said(page)).to_contain_text("word word")
    page.wait_for_timeout(500)
    before = page.evaluate("window.draws")
    page.wait_for_timeout(1000)
    drawn = page.evaluate("window.draws") - before
    assert 1 <= drawn <= 8
    page.locator("#stop").click()


# The real server ----------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_page_on_the_real_server(browser, smollm2_path):
    serving = pytest.importorskip("serving", reason="there is no server yet")
    with serving.serve(smollm2_path) as server:
        ours = SimpleNamespace(url=server.url, refused={503}, expected=set())
        visitor = Visitor(browser, ours, viewport={"width": 1280, "height": 800})
        visitor.context.set_default_timeout(60_000)
        expect.set_options(timeout=60_000)
        try:
            page = visitor.open()
            expect(page.locator("#model-name")).not_to_have_text("")
            page.locator("#show-settings").click()
            for name, value in {"temperature": "0", "max_tokens": "80", "seed": "1"}.items():
                page.locator(f"#options [name={name}]").fill(value)
            ask(page, "Repeat this line four times: The quick brown fox jumps over the lazy dog.")
            expect(page.locator(".numbers summary")).to_contain_text("tokens/s")
            done(page)
            assert "fox" in said(page).text_content()
            expect(page.locator(".numbers summary")).to_have_text(re.compile(r"\d tokens/s · MAT \d+\.\d\d"))
            expect(page.locator("#failure")).to_be_hidden()
            before = said(page).text_content()
            page.reload()
            expect(said(page)).to_have_text(before)
            page.locator("#show-settings").click()
            page.locator("#options [name=max_tokens]").fill("400")
            ask(page, "Tell a long story.")
            expect(said(page)).not_to_have_text("")
            page.keyboard.press("Escape")
            page.keyboard.press("Escape")
            done(page)
        finally:
            expect.set_options(timeout=5000)
            visitor.context.close()
        assert not visitor.wrong
