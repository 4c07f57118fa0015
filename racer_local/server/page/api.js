// The server's HTTP: keys, waiting for the model, streams. Every failure is an ApiError with one clear line.

export class ApiError extends Error {
  constructor(message, { status = 0, code = null, wait = null } = {}) {
    super(message);
    Object.assign(this, { status, code, wait });
  }
}

/** Set by the page: `askKey(refused)` answers whether there is a key now, `loading(bool)` tells the reader. */
export const hooks = { askKey: async () => false, loading: () => {} };

const KEY = "racer_local.key";

let held = null;

export function setKey(key, remember) {
  held = key;
  try {
    for (const storage of [sessionStorage, localStorage]) storage.removeItem(KEY);
    (remember ? localStorage : sessionStorage).setItem(KEY, key);
  } catch {
    // Storage may be forbidden or full; the key then lives as long as the page.
  }
}

function currentKey() {
  try {
    return held ?? sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.");
  }
}

async function errorOf(response) {
  const said = await response.json().catch(() => null);
  const message = said?.error?.message ?? `The server answered ${response.status} ${response.statusText}`.trim() + ".";
  const wait = Number.parseInt(response.headers.get("Retry-After"), 10);
  return new ApiError(message, {
    status: response.status,
    code: said?.error?.code ?? null,
    wait: wait > 0 ? wait : null,
  });
}

let polling = null;
/** Resolves when /health is 200 again; all that wait share one poll a second. */
function ready() {
  polling ??= (async () => {
    let loading = false;
    try {
      while ((await reach("/health")).status === 503) {
        if (!loading) hooks.loading((loading = true));
        await pause(1000);
      }
    } finally {
      polling = null;
      if (loading) hooks.loading(false);
    }
  })();
  return polling;
}

let asking = null;
function askKey(refused) {
  asking ??= hooks.askKey(refused).finally(() => (asking = null));
  return asking;
}

async function request(path, { signal, ...options } = {}) {
  for (let tries = 1; ; tries += 1) {
    const key = currentKey();
    const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
    const response = await reach(path, { ...options, headers, signal });
    if (response.ok) return response;
    const error = await errorOf(response);
    if (error.status === 401) {
      const newer = currentKey() !== key; // given while this request was under way
      if (newer || (await askKey(key !== null))) continue;
      throw new ApiError("The server needs a key.", { status: 401 });
    }
    if (error.status !== 503 || tries > 3) throw error;
    await Promise.race([ready(), aborted(signal)]);
    signal?.throwIfAborted();
  }
}

const aborted = (signal) => new Promise((resolve) => signal?.addEventListener("abort", resolve, { once: true }));

export const list = async (path) => (await (await request(path)).json()).data ?? [];

/** Yields the chunks of one streamed answer; throws where the stream breaks off or tells an error. */
export async function* streamChat(body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await request("/v1/chat/completions", {
    method: "POST",
    headers,
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let rest = ""; ;) {
      const { done, value } = await reader.read();
      if (done) throw new ApiError("The connection ended before the answer did.");
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue; // a blank line, or a comment that keeps the connection alive
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const chunk = parse(data);
        if (chunk.error) throw new ApiError(chunk.error.message ?? "The server failed.", { code: chunk.error.code });
        yield chunk;
      }
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError("The connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError("The server sent something that is no JSON.");
  }
}
