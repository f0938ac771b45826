// Calls of the gateway, with the tokens of this tab. They are kept in its session storage and sent in a header, not
// in a cookie, which pages of other origins could make the browser send.

const KEY = "penstock";
let tokens = kept();
let renewing = null;

export class Refused extends Error {
  constructor(status, content) {
    super(content?.detail ?? `the gateway answered ${status}`);
    this.status = status;
    this.word = content?.error;
    this.field = content?.field;
  }
}

export const isSignedIn = () => tokens !== null;

export async function signIn(username, password) {
  keep(await exchange({ grant_type: "password", username, password }));
}

// Returns the title of the identity provider; null without one.
export async function provider() {
  return (await (await fetch("/api/auth/oidc")).json()).title;
}

// Goes to the provider; the browser returns to an address that shows the result.
export async function leaveForProvider(invitation) {
  location.assign((await call("POST", "/api/auth/oidc", invitation ? { invitation } : {})).address);
}

// Takes the tokens of the session that was just started at the provider.
export async function arriveFromProvider() {
  keep(await call("POST", "/api/auth/oidc/session"));
}

// Creates an account by an invitation, and signs in.
export async function signUp(name, password, invitation) {
  await send("POST", "/api/auth/sign-up", { name, password, invitation });
  await signIn(name, password);
}

// Uses a given token from now on.
export const takeToken = (token) => keep({ access_token: token });

export async function signOut() {
  await call("POST", "/api/auth/sign-out").catch(() => null);
  keep(null);
}

// Returns the answer as JSON, null without a body. project: for a path without one.
export async function call(method, path, body, project) {
  const reply = await send(method, path, body, undefined, project);
  return reply.status === 204 ? null : reply.json();
}

// Returns the lines of an answer of JSON lines.
export async function lines(path) {
  const text = await (await send("GET", path)).text();
  return text.split("\n").filter(Boolean).map((line) => JSON.parse(line));
}

// Downloads the answer as a file, under the name that the gateway gives it.
export async function keepFile(path) {
  const reply = await send("GET", path);
  const address = URL.createObjectURL(await reply.blob());
  const link = document.createElement("a");
  link.href = address;
  link.download = /filename="([^"]+)"/.exec(reply.headers.get("Content-Disposition") ?? "")?.[1] ?? "";
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

// Yields { event, data } of a stream of server-sent events; ends with it, or when `signal` aborts. body: of a POST.
export async function* events(path, signal, body) {
  const reply = await send(body === undefined ? "GET" : "POST", path, body, signal);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (kept + value).split("\n\n");
    kept = parts.pop();
    for (const part of parts) {
      const fields = Object.fromEntries(part.split("\n").map((line) => line.split(/: (.*)/s)));
      if (fields.data !== undefined) yield { event: fields.event, data: JSON.parse(fields.data) };
    }
  }
}

// Returns the response; throws Refused for an error.
export async function send(method, path, body, signal, project) {
  let reply = await once(method, path, body, signal, project);
  if (reply.status === 401 && tokens !== null) {
    await renewed();
    reply = await once(method, path, body, signal, project);
  }
  if (!reply.ok) throw new Refused(reply.status, await reply.json().catch(() => null));
  return reply;
}

function once(method, path, body, signal, project) {
  const headers = tokens === null ? {} : { Authorization: `Bearer ${tokens.access_token}` };
  if (project !== undefined) headers["Penstock-Project"] = project;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  return fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
}

// A refresh token is exchanged once, however many calls find that the access token has expired.
function renewed() {
  renewing ??= exchange({ grant_type: "refresh_token", refresh_token: tokens.refresh_token })
    .then(keep, (error) => { keep(null); throw error; })
    .finally(() => { renewing = null; });
  return renewing;
}

async function exchange(form) {
  const reply = await fetch("/api/auth/token", { method: "POST", body: new URLSearchParams(form) });
  const content = await reply.json();
  if (!reply.ok) throw new Refused(reply.status, content);
  return content;
}

function kept() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY) ?? "null");
  } catch {
    return null; // storage is off
  }
}

function keep(found) {
  tokens = found;
  try {
    if (found === null) sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, JSON.stringify(found));
  } catch {
    // storage is off: then they hold for this page
  }
}
