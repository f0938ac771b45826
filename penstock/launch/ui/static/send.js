// Sends what a person wants; throws what is refused in the words of the gateway.

export async function send(method, path, body) {
  const reply = await fetch(path, { method, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  const content = await reply.json().catch(() => null);
  if (!reply.ok) throw Object.assign(new Error(content?.detail ?? reply.statusText), { field: content?.field });
  return content;
}
