// Markdown of a model, which nobody vouches for, to DOM that can do no harm.

import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";
import { shade } from "./shade.js";

const purify = globalThis.DOMPurify;
const escape = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  // HTML in an answer is text: the reader sees the tag that the model wrote.
  tokenizer: { html: () => undefined, tag: () => undefined },
  // Nothing is loaded from elsewhere; the picture is a click away.
  renderer: { image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>` },
});

const SAFE = {
  ALLOWED_TAGS:
    "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr input li ol p pre strong table tbody td th thead tr ul".split(
      " ",
    ),
  ALLOWED_ATTR: ["href", "title", "class", "start", "align", "type", "checked", "disabled"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i, // is asked of every attribute that is not named safe
  ADD_URI_SAFE_ATTR: ["start", "align", "type", "checked", "disabled"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer");
});

function make(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

function frame(pre) {
  const language = /\blanguage-(\S{1,24})/.exec(pre.firstElementChild?.className ?? "")?.[1] ?? "";
  const head = make("div", "code-head");
  const copy = make("button", "copy-code quiet", "Copy");
  copy.type = "button";
  copy.setAttribute("aria-label", "Copy code");
  head.append(make("span", "", language), copy);
  const box = make("div", "code");
  pre.replaceWith(box);
  box.append(head, pre);
}

/** A fragment with the answer; `marks` shades it, null leaves it plain. */
export function render(text, marks) {
  const fragment = purify.sanitize(marked.parse(text), SAFE);
  if (marks) shade(fragment, text, marks);
  for (const pre of fragment.querySelectorAll("pre")) frame(pre);
  for (const table of fragment.querySelectorAll("table")) {
    const box = make("div", "wide");
    table.replaceWith(box);
    box.append(table);
  }
  return fragment;
}

/** Puts the fragment into `target`, leaving leading blocks that did not change alone: selections there survive. */
export function place(target, fragment) {
  const fresh = [...fragment.childNodes];
  let same = 0;
  while (same < fresh.length && target.childNodes[same]?.isEqualNode(fresh[same])) same += 1;
  while (target.childNodes.length > same) target.lastChild.remove();
  target.append(...fresh.slice(same));
}
