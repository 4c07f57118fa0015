// Conversations in the browser: IndexedDB, one record each, so that tabs can't overwrite each other's.

const NAME = "racer_local";
const FORMAT = "racer_local.chats";
const channel = "BroadcastChannel" in globalThis ? new BroadcastChannel(NAME) : null;
const unsaved = new Map(); // what the browser would not keep lives as long as the tab
let opening = null;
let queue = Promise.resolve();

export const newId = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(12)), (b) => b.toString(16).padStart(2, "0")).join("");

export const newChat = (system = "") => ({ id: newId(), title: "", updated: 0, system, messages: [] });

function open() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () =>
      request.result.createObjectStore("chats", { keyPath: "id" }).createIndex("list", ["updated", "title"]);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  opening.catch(() => (opening = null));
  return opening;
}

async function transact(mode, work) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction("chats", mode);
    let result;
    transaction.oncomplete = () => resolve(result);
    transaction.onabort = () => reject(transaction.error);
    work(transaction.objectStore("chats"), (value) => (result = value));
  });
}

/** Heads of all conversations, newest first, without reading their messages. */
export async function list() {
  const kept = await transact("readonly", (chats, done) => {
    const heads = [];
    done(heads);
    chats.index("list").openKeyCursor(null, "prev").onsuccess = ({ target: { result: cursor } }) => {
      if (!cursor) return;
      heads.push({ id: cursor.primaryKey, updated: cursor.key[0], title: cursor.key[1] });
      cursor.continue();
    };
  }).catch(() => []);
  const rest = kept.filter(({ id }) => !unsaved.has(id));
  return [...unsaved.values(), ...rest].sort((a, b) => b.updated - a.updated);
}

export async function get(id) {
  if (unsaved.has(id)) return unsaved.get(id);
  const read = (chats, done) => (chats.get(id).onsuccess = (event) => done(event.target.result));
  return (await transact("readonly", read).catch(() => null)) ?? null;
}

/** Saves a conversation; where another tab saved it since we read it, ours becomes a copy with an id of its own. */
export function put(chat, tell = true) {
  const saving = queue.then(async () => {
    if (chat.deleted) return;
    unsaved.set(chat.id, chat);
    const known = chat.revision;
    try {
      await transact("readwrite", (chats, done) => {
        chats.get(chat.id).onsuccess = ({ target: { result: kept } }) => {
          if (kept && kept.revision !== known) {
            unsaved.delete(chat.id);
            Object.assign(chat, { id: newId(), title: `${chat.title} (copy)` });
            unsaved.set(chat.id, chat);
          }
          chat.revision = newId();
          try {
            chats.put(chat);
          } catch (error) {
            done(error);
          }
        };
      }).then((error) => error && Promise.reject(error));
      unsaved.delete(chat.id);
    } catch (error) {
      chat.revision = known;
      throw error;
    }
    if (tell) channel?.postMessage(chat.id);
  });
  queue = saving.catch(() => {});
  return saving;
}

export async function remove(id) {
  unsaved.delete(id);
  await queue;
  await transact("readwrite", (chats) => chats.delete(id)).catch(() => {});
  channel?.postMessage(id);
}

export const onOtherTab = (changed) => channel?.addEventListener("message", (event) => changed(event.data));

// Export and import ----------------------------------------------------------------------------------------------

export const toJson = (chats) =>
  JSON.stringify(
    { format: FORMAT, version: 1, conversations: chats.map(({ revision, deleted, ...chat }) => chat) },
    null,
    1,
  );

const text = (value) => (typeof value === "string" ? value : "");

function cleanMessage(message) {
  if (!["user", "assistant"].includes(message?.role) || typeof message.content !== "string") {
    throw new Error("a message without a role or content");
  }
  const clean = { role: message.role, content: message.content };
  if (message.role === "user") return clean;
  clean.finish = text(message.finish) || "stop";
  if (/^(?:\d{1,7}[nclpo])*$/.test(text(message.marks) || "-")) clean.marks = message.marks;
  if (message.stats && typeof message.stats === "object") clean.stats = cleanStats(message.stats);
  return clean;
}

const SHOWN = [
  "emitted", "steps", "decode_seconds", "prefill_seconds", "tokens_per_second", "plain_tokens_per_second",
  "mean_accepted_tokens", "drafted", "accepted",
];

/** What the page shows of the server's statistics. */
export function cleanStats(stats) {
  const clean = {};
  for (const name of SHOWN) if (Number.isFinite(stats[name])) clean[name] = stats[name];
  if (typeof stats.disabled_reason === "string") clean.disabled_reason = stats.disabled_reason;
  const by = stats.accepted_by_source;
  if (by) clean.accepted_by_source = { context: +by.context || 0, logits: +by.logits || 0, corpus: +by.corpus || 0 };
  return clean;
}

function cleanChat(chat) {
  if (!Array.isArray(chat?.messages)) throw new Error("a conversation without messages");
  return {
    id: /^[0-9a-f]{24}$/.test(text(chat.id)) ? chat.id : newId(),
    title: text(chat.title).slice(0, 200) || "Imported",
    updated: Number.isFinite(chat.updated) ? chat.updated : Date.now(),
    system: text(chat.system),
    messages: chat.messages.map(cleanMessage),
  };
}

/** Conversations from JSON, all or none, without those that are here already; none has the id of another. */
export async function fromJson(json) {
  let data;
  try {
    data = JSON.parse(json);
  } catch {
    throw new Error("it is no JSON");
  }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations)) throw new Error("it is no export of this page");
  const added = [];
  for (const chat of data.conversations.map(cleanChat)) {
    const here = await get(chat.id);
    if (here && JSON.stringify(cleanChat(here)) === JSON.stringify(chat)) continue;
    if (here) chat.id = newId();
    added.push(chat);
  }
  return added;
}
