// Requests to this server, with the key where there is one, and streams of events.

const KEY = "specpress.key";

/** An answer that is an error, or none at all (status 0). The message is a sentence. */
export class AskError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

const GONE = "The server does not answer. It may be starting again: try in a moment.";

async function failure(answer) {
  let told = {};
  try {
    told = (await answer.json()).error || {};
  } catch {
    // No JSON: the status has to do.
  }
  if (answer.status === 401) document.dispatchEvent(new CustomEvent("key-wanted"));
  const message = told.message || `The server answered ${answer.status}, without a reason.`;
  return new AskError(answer.status, message, told.code);
}

/** The answer, of which nothing is read yet. Throws AskError. */
export async function ask(path, body, signal) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  const init = { headers, signal, cache: "no-store", credentials: "omit" };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    Object.assign(init, { method: "POST", body: JSON.stringify(body) });
  }
  let answer;
  try {
    answer = await fetch(path, init);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new AskError(0, GONE);
  }
  if (!answer.ok) throw await failure(answer);
  return answer;
}

/** The JSON of an answer. Throws AskError. */
export async function json(path, body, signal) {
  const answer = await ask(path, body, signal);
  try {
    return await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new AskError(0, "The server's answer broke off.");
  }
}

/** Calls `heard` with each event of a stream. Throws AskError where it ends with an error, or without its end. */
export async function stream(path, body, signal, heard) {
  const answer = await ask(path, { ...body, stream: true }, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new AskError(0, "The connection to the server was lost; the text so far stays.");
    }
    if (part.done) throw new AskError(0, "The server ended the stream early; the text so far stays.");
    const blocks = (rest + part.value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue;
      const data = block.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new AskError(event.error.code === "engine_down" ? 0 : 500, event.error.message);
      heard(event);
    }
  }
}

/** Returns once the server takes requests again, or `signal` is aborted. */
export async function ready(signal) {
  while (!signal.aborted) {
    try {
      if ((await fetch("/health", { signal })).ok) {
        await ask("/ready", undefined, signal);
        return;
      }
    } catch (error) {
      if (error.status === 401 || error.name === "AbortError") throw error;
    }
    await new Promise((done) => setTimeout(done, 500));
  }
}
