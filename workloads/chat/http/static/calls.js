// Calls of the chat. A token lies in the storage of this tab; the name that this browser has made for itself, in that
// of the browser: by it, and by nothing else, a person finds again what they have said.

const TOKEN = "penstock-chat-token";
const ME = "penstock-chat-me";

export class Refused extends Error {
  constructor(status, content) {
    super(content?.detail ?? `the server answered ${status}`);
    this.status = status;
  }
}

let agent = "";

// Whom calls are about from now on; "": the first.
export const talkTo = (name) => {
  agent = name;
};

export const keepToken = (token) => sessionStorage.setItem(TOKEN, token);

export const fresh = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (one) => one.toString(16).padStart(2, "0")).join("");

export function me() {
  let name = localStorage.getItem(ME);
  if (name === null) {
    name = fresh();
    localStorage.setItem(ME, name);
  }
  return name;
}

export const forgetMe = () => localStorage.removeItem(ME);

async function asked(method, path, body, signal) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const whom = agent === "" ? path : `${path}?agent=${encodeURIComponent(agent)}`;
  const reply = await fetch(whom, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  if (!reply.ok) throw new Refused(reply.status, await reply.json().catch(() => null));
  return reply;
}

export async function call(method, path, body) {
  return (await asked(method, path, body)).json();
}

// Calls, and hands each server-sent event to `take(kind, data)` as it comes.
export async function follow(path, body, signal, take) {
  const reader = (await asked("POST", path, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const one of events) {
      const lines = Object.fromEntries(one.split("\n").map((line) => line.split(/: (.*)/s).slice(0, 2)));
      take(lines.event, JSON.parse(lines.data));
    }
  }
}
