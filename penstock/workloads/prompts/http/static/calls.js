// Calls of the API of prompts. Where a token is asked for, it lies in the storage of this tab and goes in a header.

const KEY = "penstock-prompts";

export class Refused extends Error {
  constructor(status, content) {
    super(content?.detail ?? `the server answered ${status}`);
    this.status = status;
  }
}

export const keepToken = (token) => sessionStorage.setItem(KEY, token);

export async function call(method, path, body) {
  const token = sessionStorage.getItem(KEY);
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const reply = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  const content = await reply.json().catch(() => null);
  if (!reply.ok) throw new Refused(reply.status, content);
  return content;
}
