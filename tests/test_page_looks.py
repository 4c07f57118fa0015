"""How the page shows its words: shading, keyboard, sizes and schemes; and once the real server behind it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pages
import pytest
from page_mock import Answer, pieces_of
from pages import ATTACKS, RICH, Visitor, ask, done, eventually, expect, rendered, said, spans_of

browser, mock, modules, page, visitor = pages.browser, pages.mock, pages.modules, pages.page, pages.visitor

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
    expect(page.locator("#text")).to_be_focused()
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
    expect(page.locator("#text")).to_be_focused()

    mock.script.append(Answer("word " * 300, pause=0.05))
    keys.press("Control+Shift+Enter")
    expect(said(page)).to_contain_text("word word")
    keys.press("Escape")
    expect(page.locator(".end")).to_have_text("Stopped.")

    keys.press("Control+,")
    expect(page.get_by_label("Draft tokens with racer")).to_be_focused()
    keys.press("Space")
    keys.press("Escape")
    expect(page.locator("#text")).to_be_focused()
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
    eventually(page, lambda: focus(page) == "second")
    keys.press("F2")
    keys.type("renamed")
    keys.press("Enter")
    expect(page.locator("#list .open").first).to_have_text("renamed")
    eventually(page, lambda: focus(page) == "renamed")
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
