"""A real browser for the tests of the page at /, which skips them where there is none.

A test module takes the fixtures over by assignment: `page = pages.page`.
"""

from __future__ import annotations

import re
import shutil

import pytest
from page_mock import mock_server

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
