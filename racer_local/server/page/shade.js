// Which draft source each piece of an answer came from, and the shading that shows it.
//
// A message keeps its pieces as a string of lengths and letters: [["Hello", null], [", wor", "context"]] is "5n6c".

export const SOURCES = ["context", "logits", "corpus"];
const LETTERS = { context: "c", logits: "l", corpus: "p" };
const LABELS = { c: 1, l: 2, p: 3 };
const ENTITY = /&(?:#\d{1,7}|#x[\da-f]{1,6}|[a-z]\w{1,31});/iy;
const GRAPHEMES = new Intl.Segmenter(undefined, { granularity: "grapheme" });
const MAY_JOIN = /[^\u0000-\u02ff\u3000-\u9fff]/; // neither Latin nor Chinese or Japanese: segmenting takes time

/** The marks of a chunk; text whose sources don't add up to it is "o", of unknown origin. */
export function marksOf(text, sources) {
  const whole = Array.isArray(sources) && sources.map(([piece]) => piece).join("") === text;
  if (!whole) return text ? `${text.length}o` : "";
  return sources.map(([piece, source]) => piece.length + (source === null ? "n" : (LETTERS[source] ?? "o"))).join("");
}

const pieces = (marks) => [...marks.matchAll(/(\d+)([nclpo])/g)].map(([, length, letter]) => [Number(length), letter]);

/** "5n6c2n" -> [1, 2]: tokens that each verify step gave, its bonus token included. */
export function acceptedLengths(marks) {
  const lengths = [];
  let length = 0;
  for (const [, letter] of pieces(marks)) {
    length += 1;
    if (letter === "n") {
      lengths.push(length);
      length = 0;
    }
  }
  return lengths;
}

function labelsOf(text, marks) {
  const labels = new Uint8Array(text.length);
  let at = 0;
  for (const [length, letter] of pieces(marks)) labels.fill(LABELS[letter] ?? 0, at, (at += length));
  return at === text.length ? labels : null;
}

/** Where in the Markdown `text`, from `at` on, the rendered `rest` goes on; -1 if nowhere near. */
function find(text, at, rest) {
  for (const [length, reach] of [
    [12, 4000],
    [5, 400],
    [2, 60],
    [1, 8],
  ]) {
    if (rest.length < length) continue;
    const found = text.slice(at, at + reach).indexOf(rest.slice(0, length));
    if (found >= 0) return at + found;
  }
  return -1;
}

/** Wraps what was drafted in spans, in place. Rendered characters are nearly a subsequence of the Markdown `text`. */
export function shade(fragment, text, marks) {
  const labels = labelsOf(text, marks);
  if (!labels?.some(Boolean)) return;
  const walker = document.createTreeWalker(fragment, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) if (walker.currentNode.data.trim()) nodes.push(walker.currentNode);
  let at = 0;
  for (const node of nodes) {
    const rendered = node.data;
    const own = new Uint8Array(rendered.length);
    for (let i = 0; i < rendered.length; i += 1) {
      let label = labels[Math.min(at, labels.length - 1)];
      if (rendered[i] === text[at]) {
        at += 1;
      } else if (rendered[i].trim()) {
        [label, at] = skip(text, at, rendered.slice(i, i + 12), labels);
      }
      own[i] = label;
    }
    if (own.some(Boolean)) node.replaceWith(...runsOf(rendered, own));
  }
}

function runsOf(rendered, labels) {
  for (const { 0: space, index } of rendered.matchAll(/\s+/g)) {
    const end = index + space.length; // only what stands between two words of one source is shaded
    labels.fill(labels[index - 1] === labels[end] ? labels[end] : 0, index, end);
  }
  if (MAY_JOIN.test(rendered)) {
    for (const { segment, index } of GRAPHEMES.segment(rendered))
      labels.fill(labels[index], index, index + segment.length);
  }
  const parts = [];
  for (let start = 0, i = 1; i <= rendered.length; i += 1) {
    if (i < rendered.length && labels[i] === labels[start]) continue;
    parts.push(wrap(rendered.slice(start, i), labels[start]));
    start = i;
  }
  return parts;
}

/** The label of a rendered character that is not at `at`, and where to go on: past an entity, an address, syntax. */
function skip(text, at, rest, labels) {
  ENTITY.lastIndex = at;
  if (ENTITY.test(text) && !text.startsWith(rest, ENTITY.lastIndex)) return [labels[at], ENTITY.lastIndex];
  const from = text.startsWith("](", at) ? Math.max(at, text.indexOf(")", at)) : at;
  const found = find(text, from, rest);
  return found < 0 ? [labels[Math.min(at, labels.length - 1)], at] : [labels[found], found + 1];
}

function wrap(text, label) {
  if (!label) return document.createTextNode(text);
  const span = document.createElement("span");
  span.className = `from-${SOURCES[label - 1]}`;
  span.textContent = text;
  return span;
}
