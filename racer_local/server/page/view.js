// One message on the page: its text, its numbers, its plot, its buttons.

import { place, render } from "./render.js";
import { acceptedLengths } from "./shade.js";

/** el("button", { className: "quiet", onclick }, "Copy") */
export function el(tag, properties = {}, ...children) {
  const { aria, ...rest } = properties;
  const element = Object.assign(document.createElement(tag), rest);
  for (const [name, value] of Object.entries(aria ?? {})) element.setAttribute(`aria-${name}`, value);
  element.append(...children);
  return element;
}

const ENDS = {
  __proto__: null,
  stopped: "Stopped.",
  length: "Cut off at the token limit.",
  interrupted: "Interrupted by a reload.",
  error: "Broke off.",
};

/** "41.2 tokens/s · MAT 2.31 · plain about 19.8" */
export function statsLine(stats) {
  const { emitted, steps, decode_seconds: seconds, plain_tokens_per_second: plain } = stats;
  const speed = stats.tokens_per_second ?? (seconds > 0 ? emitted / seconds : null);
  const mat = stats.mean_accepted_tokens ?? (steps > 0 ? emitted / steps : null);
  const parts = [];
  if (speed) parts.push(`${speed.toFixed(1)} tokens/s`);
  if (mat) parts.push(`MAT ${mat.toFixed(2)}`);
  if (plain) parts.push(`plain about ${plain.toFixed(1)}`);
  return parts.join(" · ");
}

function detailLine(stats) {
  const parts = [];
  if (stats.prompt_tokens) parts.push(`prompt ${stats.prompt_tokens} tokens`);
  if (stats.prefill_seconds) parts.push(`read in ${stats.prefill_seconds.toFixed(2)} s`);
  if (stats.drafted) parts.push(`${stats.accepted ?? 0} of ${stats.drafted} drafted tokens accepted`);
  for (const [source, count] of Object.entries(stats.accepted_by_source ?? {}))
    if (count) parts.push(`${source} ${count}`);
  return parts.join(" · ");
}

const SVG = "http://www.w3.org/2000/svg";
const BARS = 96;

/** One bar a step, of the last steps: how many tokens it gave. */
function drawPlot(plot, marks) {
  const lengths = acceptedLengths(marks ?? "").slice(-BARS);
  const longest = Math.max(4, ...lengths);
  plot.toggleAttribute("hidden", lengths.length < 2);
  plot.setAttribute("viewBox", `0 0 ${BARS * 2} 20`);
  plot.firstChild.setAttribute(
    "d",
    lengths.map((n, i) => `M${i * 2 + 0.75} 20v-${((19 * n) / longest).toFixed(1)}`).join(""),
  );
  plot.setAttribute(
    "aria-label",
    `Accepted length of the last ${lengths.length} steps, at most ${Math.max(0, ...lengths)}`,
  );
}

function makePlot() {
  const plot = document.createElementNS(SVG, "svg");
  plot.setAttribute("class", "plot");
  plot.setAttribute("role", "img");
  plot.append(document.createElementNS(SVG, "path"));
  return plot;
}

export class MessageView {
  /** `act(name, message)` is called for the buttons "edit" and "again". */
  constructor(message, act) {
    this.message = message;
    const mine = message.role === "user";
    this.body = el("div", { className: "body" });
    this.editButton = el("button", { type: "button", className: "quiet", onclick: () => act("edit", message) }, "Edit");
    this.againButton = el(
      "button",
      { type: "button", className: "quiet", onclick: () => act("again", message) },
      "Answer again",
    );
    this.copyButton = el("button", { type: "button", className: "quiet copy-message" }, "Copy");
    this.actions = el("div", { className: "actions" }, this.copyButton, this.editButton, this.againButton);
    this.speed = el("summary", {});
    this.details = el("p", {});
    this.numbers = el("details", { className: "numbers" }, this.speed, this.details);
    this.plot = makePlot();
    this.end = el("p", { className: "end" });
    this.measures = el("div", { className: "measures" }, this.numbers, this.plot);
    const foot = el("footer", {}, ...(mine ? [] : [this.measures, this.end]), this.actions);
    this.article = el(
      "article",
      { className: mine ? "mine" : "answer", aria: { label: mine ? "You" : "Answer" } },
      this.body,
      foot,
    );
  }

  update({ running, last, shaded }) {
    const { message } = this;
    const mine = message.role === "user";
    const key = `${mine || shaded}${message.content}`;
    if (this.key !== key && !this.editing) {
      this.key = key;
      if (mine) this.body.textContent = message.content;
      else place(this.body, render(message.content, shaded ? message.marks : null));
    }
    const live = running && last && !mine;
    this.actions.hidden = running || this.editing;
    this.againButton.hidden = mine || !last;
    this.article.classList.toggle("live", live);
    this.body.classList.toggle("waiting", live && !message.content);
    if (!mine) this.updateNumbers(live);
  }

  updateNumbers(live) {
    const { stats = {}, marks, finish, content } = this.message;
    this.speed.textContent = statsLine(stats);
    this.details.textContent = detailLine(stats);
    this.numbers.classList.toggle("bare", !this.details.textContent);
    this.measures.hidden = !this.speed.textContent;
    if (this.plotted !== marks) drawPlot(this.plot, (this.plotted = marks));
    this.end.textContent = live
      ? ""
      : [ENDS[finish] ?? (content ? "" : "The model said nothing."), stats.disabled_reason].filter(Boolean).join(" ");
    this.end.hidden = !this.end.textContent;
  }

  /** Swaps the text for a box; `done(text)` gets the new text, or null when nothing is to change. */
  edit(done) {
    const mine = this.message.role === "user";
    const close = (value) => {
      this.editing = false;
      this.key = null;
      this.body.replaceChildren();
      done(value);
    };
    const box = el("textarea", {
      defaultValue: this.message.content,
      aria: { label: mine ? "Your message" : "The answer" },
    });
    const save = el(
      "button",
      { type: "button", className: "strong", onclick: () => close(box.value) },
      mine ? "Send" : "Save",
    );
    const cancel = el("button", { type: "button", onclick: () => close(null) }, "Cancel");
    box.addEventListener("input", () => fit(box));
    box.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      const sends = event.key === "Enter" && (mine ? !event.shiftKey : event.ctrlKey || event.metaKey);
      if (!sends && event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      close(sends ? box.value : null);
    });
    this.editing = true;
    this.actions.hidden = true;
    this.body.replaceChildren(el("div", { className: "editor" }, box, el("div", { className: "row" }, save, cancel)));
    fit(box);
    box.focus();
  }
}

export function fit(box) {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}
