// What the reader has set: kept in the browser, shown in the panel, sent with each request.

import { list } from "./api.js";
import { el } from "./view.js";

const $ = (id) => document.getElementById(id);
const NAME = "racer_local.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repeat_penalty", "max_tokens", "seed"];
const SAMPLING = [...NUMBERS, "stop"];
const DEFAULTS = { theme: "", system: "", racer: true, shade: true, corpora: [], model: "" };
let models = [];
let corpora = [];

/** What `look` finds; null where storage is forbidden, full or broken. */
export function read(look) {
  try {
    return look();
  } catch {
    return null;
  }
}

export const settings = {
  ...DEFAULTS,
  ...Object.fromEntries(SAMPLING.map((name) => [name, ""])),
  ...read(() => JSON.parse(localStorage.getItem(NAME))),
};

/** The fields of a request that the reader has chosen; the server has defaults for the others. */
export function requestFields() {
  const fields = { model: settings.model };
  for (const name of NUMBERS) if (settings[name] !== "") fields[name] = Number(settings[name]);
  const stop = settings.stop.split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop.map((line) => line.replaceAll("\\n", "\n"));
  const chosen = settings.corpora.filter((id) => corpora.some((corpus) => corpus.id === id));
  fields.racer = settings.racer ? { sources: true } : { draft: "none", sources: true };
  if (chosen.length && settings.racer) fields.racer.corpora = chosen;
  return fields;
}

/** Asks the server for its models and corpora. */
export async function loadChoices() {
  models = await list("/v1/models");
  corpora = await list("/v1/corpora").catch(() => []);
  const known = models.some(({ id }) => id === settings.model);
  if (!known) settings.model = (models.find((one) => one.loaded) ?? models[0])?.id ?? "";
  const several = models.length > 1;
  $("model").hidden = !several;
  $("model").replaceChildren(...models.map(({ id }) => new Option(id, id, false, id === settings.model)));
  $("model-name").textContent = several ? "" : settings.model;
  for (const label of $("corpora").querySelectorAll("label")) label.remove();
  $("corpora").hidden = !corpora.length;
  $("corpora").append(...corpora.map(corpusLabel));
}

function corpusLabel({ id, tokens }) {
  const size = Number.isFinite(tokens) ? `${tokens.toLocaleString("en")} tokens` : "";
  const box = el("input", { type: "checkbox", name: "corpus", value: id, checked: settings.corpora.includes(id) });
  return el("label", { className: "check" }, box, id, el("span", { className: "faint" }, size));
}

function apply() {
  const root = document.documentElement;
  if (settings.theme) root.dataset.theme = settings.theme;
  else delete root.dataset.theme;
  root.toggleAttribute("data-shade", settings.shade);
}

function keep() {
  read(() => localStorage.setItem(NAME, JSON.stringify(settings)));
  apply();
}

function show() {
  const form = $("options");
  for (const name of [...SAMPLING, "theme"]) form[name].value = settings[name];
  for (const name of ["racer", "shade"]) form[name].checked = settings[name];
}

/** Calls `changed(name)` after each change. */
export function watchSettings(changed) {
  $("options").addEventListener("input", ({ target }) => {
    const { name, type } = target;
    if (name === "corpus") {
      settings.corpora = [...$("corpora").querySelectorAll(":checked")].map((box) => box.value);
    } else if (target.validity.valid) {
      settings[name] = type === "checkbox" ? target.checked : target.value;
    }
    keep();
    changed(name);
  });
  $("options").addEventListener("submit", (event) => event.preventDefault());
  $("model").addEventListener("change", () => {
    settings.model = $("model").value;
    keep();
  });
  $("reset").addEventListener("click", () => {
    for (const name of SAMPLING) settings[name] = "";
    keep();
    show();
  });
  apply();
  show();
}
