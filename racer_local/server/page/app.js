// The page: which conversation is open, what is being answered, and what the reader does.

import * as api from "./api.js";
import { closePanel, closePanels, togglePanel } from "./panels.js";
import { loadChoices, read, requestFields, settings, watchSettings } from "./settings.js";
import { marksOf } from "./shade.js";
import * as store from "./store.js";
import { el, fit, MessageView } from "./view.js";

const $ = (id) => document.getElementById(id);
const TICK = 150;

const runs = new Map(); // chat -> the answer being written in it
const failures = new WeakMap(); // chat -> what went wrong last
const views = new WeakMap(); // message -> its MessageView
let chat = store.newChat(settings.system);

/** To the message box, but not where that would bring up a keyboard of glass. */
function home() {
  if (matchMedia("(hover: hover)").matches) $("text").focus();
}

const say = (line) => ($("say").textContent = line);

function notice(line, action, onclick) {
  const shut = () => {
    notice("");
    home();
  };
  const run = () => {
    shut();
    onclick();
  };
  const close = el("button", { type: "button", className: "quiet", onclick: shut }, "Dismiss");
  $("notice").hidden = !line;
  $("notice").replaceChildren(
    el("span", {}, line),
    ...(action ? [el("button", { type: "button", onclick: run }, action)] : []),
    close,
  );
}

// Conversations --------------------------------------------------------------------------------------------------

let warned = false;
async function save(which, tell = true) {
  const id = which.id;
  try {
    await store.put(which, tell);
  } catch (error) {
    if (!warned)
      notice(`This browser does not keep the conversation (${error?.name ?? "storage failed"}); export it to keep it.`);
    warned = true;
  }
  if (which === chat && id !== which.id) history.replaceState(null, "", `#${which.id}`);
  if (tell) await drawList();
}

const isEditing = () =>
  [...document.querySelectorAll(".editor textarea")].some((box) => box.value !== box.defaultValue);

async function openChat(id) {
  if (isEditing() && !confirm("Drop the edit that you have begun?")) {
    history.replaceState(null, "", `#${chat.id}`);
    return;
  }
  const running = [...runs.keys()].find((one) => one.id === id);
  const found = running ?? (id ? await store.get(id) : null);
  chat = found ?? store.newChat(settings.system);
  if (!running) mend(chat);
  history.replaceState(null, "", found ? `#${chat.id}` : location.pathname);
  $("text").value = read(() => sessionStorage.getItem(draftName())) ?? "";
  $("options").system.value = chat.system;
  fit($("text"));
  closePanel("chats");
  draw({ toEnd: true });
  await drawList();
}

/** An answer that a reload cut off ends where it was saved last. */
function mend(which) {
  const last = which.messages.at(-1);
  if (last?.role !== "assistant" || last.finish) return;
  if (last.content) last.finish = "interrupted";
  else withdraw(which);
}

/** Takes back an answer that never began. */
function withdraw(which) {
  const { replaced } = which.messages.pop();
  if (replaced) which.messages.push(replaced);
}

const draftName = () => `draft:${chat.updated ? chat.id : "new"}`;
function keepDraft() {
  read(() =>
    $("text").value ? sessionStorage.setItem(draftName(), $("text").value) : sessionStorage.removeItem(draftName()),
  );
}

async function drawList() {
  const heads = await store.list();
  if ($("list").querySelector("input")) return; // a title is being typed
  const focused = document.activeElement?.closest?.("#list li")?.dataset.id;
  const first = heads.some(({ id }) => id === chat.id) ? chat.id : heads[0]?.id;
  $("list").replaceChildren(...heads.map((head) => row(head, first)));
  $("none").hidden = heads.length > 0;
  $("title").textContent = chat.title || "New chat";
  document.title = chat.title ? `${chat.title} – racer_local` : "racer_local";
  if (focused) (rowOf(focused) ?? $("list").firstChild)?.querySelector(".open").focus();
}

const rowOf = (id) => [...$("list").children].find((li) => li.dataset.id === id);

function icon(name, label, onclick) {
  const button = el("button", { type: "button", className: "icon", tabIndex: -1, onclick, aria: { label } });
  button.innerHTML = `<svg><use href="#icon-${name}"/></svg>`;
  return button;
}

function row(head, first) {
  const current = head.id === chat.id;
  const open = el(
    "button",
    { type: "button", className: "open", title: head.title, onclick: () => openChat(head.id) },
    head.title,
  );
  open.tabIndex = head.id === first ? 0 : -1;
  if (current) open.setAttribute("aria-current", "true");
  const buttons = [
    icon("rename", `Rename ${head.title}`, () => rename(head.id)),
    icon("delete", `Delete ${head.title}`, () => remove(head.id)),
  ];
  if (current) for (const button of buttons) button.tabIndex = 0;
  const li = el("li", {}, open, ...buttons);
  li.dataset.id = head.id;
  return li;
}

const holder = async (id) =>
  id === chat.id ? chat : ([...runs.keys()].find((one) => one.id === id) ?? (await store.get(id)));

async function rename(id) {
  const li = rowOf(id);
  const box = el("input", { value: li.querySelector(".open").textContent, maxLength: 200, aria: { label: "Title" } });
  const finish = async (keep) => {
    if (!box.isConnected) return;
    const title = box.value.trim();
    box.onblur = null;
    li.replaceChildren(el("button", { type: "button", className: "open" })); // holds the focus until the list is drawn
    li.firstChild.focus();
    const which = keep && title ? await holder(id) : null;
    if (which) await save(Object.assign(which, { title }));
    else await drawList();
  };
  box.onkeydown = (event) => {
    event.stopPropagation();
    if (event.key === "Enter" && !event.isComposing) finish(true);
    if (event.key === "Escape") finish(false);
  };
  box.onblur = () => finish(true);
  li.replaceChildren(box);
  box.select();
}

async function remove(id) {
  const which = await holder(id);
  if (!which) return;
  runs.get(which)?.abort.abort();
  which.deleted = true;
  await store.remove(id);
  notice(`Deleted “${which.title}”.`, "Undo", async () => {
    which.deleted = false;
    await save(which);
    await openChat(which.id);
  });
  if (id === chat.id) await openChat(null);
  else await drawList();
}

function exportChats(which, name) {
  if (!which.some(({ messages }) => messages.length)) return notice("There is nothing to export yet.");
  const url = URL.createObjectURL(new Blob([store.toJson(which)], { type: "application/json" }));
  el("a", {
    href: url,
    download: `${
      name
        .replace(/[^\p{L}\p{N} _-]/gu, "")
        .trim()
        .slice(0, 60) || "chat"
    }.json`,
  }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

async function importChats(file) {
  closePanel("chats");
  try {
    const added = await store.fromJson(await file.text());
    const many = added.length === 1 ? "1 conversation" : `${added.length} conversations`;
    notice(added.length ? `Imported ${many}.` : `All of ${file.name} is here already.`);
    for (const one of added) await save(one);
    if (added.length) await openChat(added[0].id);
  } catch (error) {
    notice(`Nothing was imported from ${file.name}: ${error.message}.`);
  }
}

// Answers --------------------------------------------------------------------------------------------------------

function bodyOf(which) {
  const messages = which.messages.map(({ role, content }) => ({ role, content }));
  if (which.system.trim()) messages.unshift({ role: "system", content: which.system });
  return { messages, stream: true, stream_options: { include_usage: true }, ...requestFields() };
}

/** Has the last message answered. What it replaces stays with it until it begins, and comes back where it never does. */
async function answer(which, replaced = null) {
  if (runs.has(which)) return;
  const body = bodyOf(which);
  const message = { role: "assistant", content: "", marks: "", ...(replaced && { replaced }) };
  const run = { message, abort: new AbortController(), next: null, saver: null };
  runs.set(which, run);
  failures.delete(which);
  which.messages.push(message);
  draw({ toEnd: true });
  try {
    for await (const chunk of api.streamChat(body, run.abort.signal)) take(which, run, chunk);
    message.finish ??= "stop";
  } catch (error) {
    message.finish = error.name === "AbortError" ? "stopped" : "error";
    if (message.finish === "error") failures.set(which, failureOf(error));
    if (error.status === 404) load(); // the server has other models now
  }
  clearTimeout(run.next);
  clearTimeout(run.saver);
  runs.delete(which);
  if (!message.content && message.finish !== "stop" && message.finish !== "length") {
    withdraw(which);
  }
  delete message.replaced;
  which.updated = Date.now();
  if (which === chat) draw();
  say(failures.has(which) ? "" : message.finish === "stopped" ? "Stopped." : "The answer is complete.");
  await save(which);
}

function take(which, run, chunk) {
  const { message } = run;
  const [choice] = chunk.choices ?? [];
  const text = choice?.delta?.content ?? "";
  message.content += text;
  if (text) delete message.replaced;
  message.marks += marksOf(text, chunk.racer?.sources);
  if (choice?.finish_reason) message.finish = choice.finish_reason;
  if (chunk.racer) message.stats = { ...message.stats, ...store.cleanStats(chunk.racer) };
  if (chunk.usage) message.stats = { ...message.stats, prompt_tokens: chunk.usage.prompt_tokens };
  run.next ??= setTimeout(() => tick(which, run), run.wait ?? 0);
  run.saver ??= setTimeout(() => saveSoFar(which, run), 900);
}

function saveSoFar(which, run) {
  run.saver = null;
  if (run.message.content) save(which, false);
}

function tick(which, run) {
  run.next = null;
  if (which !== chat || !runs.has(which)) return;
  const began = performance.now();
  follow(() => views.get(run.message)?.update({ running: true, last: true, shaded: settings.shade }));
  run.wait = Math.max(TICK, 12 * (performance.now() - began)); // the model needs the same cores
}

function failureOf(error) {
  const { status, code, wait, message } = error;
  if (code === "context_length_exceeded")
    return { line: `${message} Shorten a message or start a new chat.`, retry: false };
  if (status === 429) return { line: wait ? `${message} It asks to wait ${wait} s.` : message, retry: true };
  return { line: message, retry: true };
}

function retry(which) {
  const last = which.messages.at(-1);
  if (last?.role === "assistant") return again(last);
  home();
  answer(which);
}

function again(message) {
  if (runs.has(chat) || chat.messages.at(-1) !== message) return;
  home(); // the button pressed is about to go
  chat.messages.pop();
  answer(chat, message);
}

async function send() {
  const text = $("text").value;
  if (!text.trim() || runs.has(chat)) return;
  $("text").value = "";
  keepDraft();
  fit($("text"));
  await ask(text);
}

const titleOf = (text) => (text.length > 60 ? `${text.slice(0, 60).replace(/\s\S*$/, "")} …` : text);

async function ask(text) {
  const which = chat;
  which.messages.push({ role: "user", content: text });
  which.title ||= titleOf(text.trim().replace(/\s+/g, " "));
  which.updated = Date.now();
  history.replaceState(null, "", `#${which.id}`);
  const answered = answer(which);
  await save(which);
  await answered;
}

function edit(message) {
  if (runs.has(chat) || !views.has(message) || views.get(message).editing) return;
  const which = chat;
  views.get(message).edit(async (text) => {
    const at = which.messages.indexOf(message);
    home();
    if (text === null || at < 0 || runs.has(which) || (message.role === "assistant" && text === message.content))
      return draw();
    failures.delete(which);
    if (message.role === "user") {
      if (!text.trim()) return draw();
      which.messages.splice(at);
      return ask(text);
    }
    which.messages[at] = { role: "assistant", content: text, finish: "stop" };
    which.updated = Date.now();
    draw();
    await save(which);
  });
}

// Drawing --------------------------------------------------------------------------------------------------------

/** Keeps the end of the conversation in sight if it was. */
function follow(change, toEnd = false) {
  const pane = $("scroll");
  const atEnd = toEnd || pane.scrollHeight - pane.scrollTop - pane.clientHeight < 48;
  change();
  if (atEnd) pane.scrollTop = pane.scrollHeight;
}

function draw({ toEnd = false } = {}) {
  follow(() => {
    const running = runs.has(chat);
    const list = $("messages");
    chat.messages.forEach((message, i) => {
      if (!views.has(message)) views.set(message, new MessageView(message, (name) => ({ edit, again })[name](message)));
      const view = views.get(message);
      view.update({ running, last: i === chat.messages.length - 1, shaded: settings.shade });
      if (list.children[i] !== view.article) list.insertBefore(view.article, list.children[i] ?? null);
    });
    while (list.children.length > chat.messages.length) list.lastChild.remove();
    $("empty").hidden = chat.messages.length > 0;
    $("send").hidden = running;
    $("stop").hidden = !running;
    drawFailure(running);
  }, toEnd);
}

function drawFailure(running) {
  const unanswered = chat.messages.at(-1)?.role === "user" && { line: "Not answered yet.", retry: true };
  const failure = running ? null : (failures.get(chat) ?? unanswered);
  $("failure").hidden = !failure;
  if (!failure) return;
  const which = chat;
  const button = el(
    "button",
    { type: "button", onclick: () => retry(which) },
    failure.line === unanswered.line ? "Answer" : "Retry",
  );
  $("failure").replaceChildren(el("span", {}, failure.line), ...(failure.retry ? [button] : []));
}

// Dialogs, notices, copies -------------------------------------------------------------------------------------

const systemSavers = new Map();
function changed(name) {
  if (name === "shade") draw();
  if (name !== "system") return;
  chat.system = settings.system; // new chats begin with it, too
  const which = chat;
  clearTimeout(systemSavers.get(which));
  if (which.updated) systemSavers.set(which, setTimeout(() => save(which), 500));
}

const load = () => loadChoices().catch((error) => notice(error.message, "Retry", load));

api.hooks.loading = (loading) => notice(loading ? "Loading the model …" : "");

api.hooks.askKey = (refused) =>
  new Promise((resolve) => {
    $("key-line").textContent = refused ? "The server refused the last one." : "Whoever started the server knows it.";
    $("key-text").value = "";
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      const kept = read(() => (api.setKey($("key-text").value.trim(), $("key-remember").checked), true));
      resolve(Boolean(kept));
      $("key").close();
    };
    $("key").onclose = () => resolve(false);
    $("key").showModal();
  });

async function copy(button, text) {
  button.dataset.label ??= button.textContent;
  const copied = navigator.clipboard?.writeText(text) ?? Promise.reject(); // there is none over plain HTTP from elsewhere
  button.textContent = await copied.then(
    () => "Copied",
    () => "Copy failed",
  );
  setTimeout(() => (button.textContent = button.dataset.label), 1500);
}

// What the reader does -------------------------------------------------------------------------------------------

function stop() {
  runs.get(chat)?.abort.abort();
  home();
}

function shortcut(event) {
  const { key, shiftKey } = event;
  const last = chat.messages.at(-1);
  if (document.querySelector("dialog[open]")) return;
  if (key === "Escape") {
    if (runs.has(chat) && !$("page").inert) stop();
    else if (!closePanels()) home();
  } else if (!(event.ctrlKey || event.metaKey) || event.altKey) {
    return;
  } else if (key === "/") $("help").showModal();
  else if (key === ",") togglePanel("settings");
  else if (shiftKey && key.toLowerCase() === "o") openChat(null).then(() => $("text").focus());
  else if (shiftKey && key.toLowerCase() === "l") togglePanel("chats", true);
  else if (shiftKey && key === "Enter" && last && !runs.has(chat) && !$("messages").querySelector(".editor"))
    retry(chat);
  else return;
  event.preventDefault();
}

function inText(event) {
  if (event.isComposing) return;
  const mine = chat.messages.findLast(({ role }) => role === "user");
  if (event.key === "Enter" && !event.shiftKey && !event.ctrlKey && !event.metaKey) send();
  else if (event.key === "ArrowUp" && !$("text").value && mine) edit(mine);
  else return;
  event.preventDefault();
}

function inList(event) {
  const li = event.target.closest("li");
  const next = { ArrowDown: li?.nextSibling, ArrowUp: li?.previousSibling }[event.key];
  if (next) next.querySelector(".open").focus();
  else if (li && event.key === "F2") rename(li.dataset.id);
  else if (li && event.key === "Delete") remove(li.dataset.id);
  else return;
  event.preventDefault();
}

$("composer").addEventListener("submit", (event) => (event.preventDefault(), send()));
$("text").addEventListener("keydown", inText);
$("text").addEventListener("input", () => (fit($("text")), keepDraft()));
$("stop").addEventListener("click", stop);
$("list").addEventListener("keydown", inList);
$("new").addEventListener("click", () => openChat(null).then(() => $("text").focus()));
$("export").addEventListener("click", () => exportChats([chat], chat.title));
$("export-all").addEventListener("click", async () => {
  const all = await Promise.all((await store.list()).map(({ id }) => holder(id)));
  exportChats(all.filter(Boolean), "racer_local chats");
});
$("import").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  const [file] = $("file").files;
  if (file) await importChats(file);
  $("file").value = ""; // the same file may be chosen again
});
$("show-help").addEventListener("click", () => $("help").showModal());
$("key-cancel").addEventListener("click", () => $("key").close());
$("messages").addEventListener("click", ({ target }) => {
  if (target.matches(".copy-code")) copy(target, target.closest(".code").querySelector("pre").textContent);
  if (target.matches(".copy-message"))
    copy(target, chat.messages[[...$("messages").children].indexOf(target.closest("article"))].content);
});
const opened = ({ target }) => target.closest("footer").scrollIntoView({ block: "nearest" });
$("messages").addEventListener("toggle", opened, true); // it does not bubble
document.addEventListener("keydown", shortcut);
addEventListener("hashchange", () => openChat(location.hash.slice(1)));
addEventListener("beforeunload", (event) => {
  if (isEditing()) event.preventDefault();
});
addEventListener("pagehide", () => {
  for (const which of runs.keys()) store.put(which, false).catch(() => {});
});
store.onOtherTab(async (id) => {
  if (id === chat.id && chat.updated && !runs.has(chat) && !$("messages").querySelector(".editor")) {
    const fresh = await store.get(id);
    if (fresh && fresh.revision !== chat.revision) await openChat(id);
  }
  await drawList();
});

watchSettings(changed);
await openChat(location.hash.slice(1));
home();
await load();
