// Feedback on what agents answered, who belongs to the project, and who did what in it.

import { call, lines } from "./api.js";
import { button, choice, element, field, form, table, when } from "./elements.js";

export async function feedback({ base, role }) {
  const shown = element("div", {});
  const act = async ({ agent }) => {
    const found = await lines(`${base}/agents/${encodeURIComponent(agent)}/feedback`);
    const scores = found.map((one) => one.score).filter((one) => one !== null);
    const mean = scores.reduce((sum, one) => sum + one, 0) / scores.length;
    const told = scores.length < 10 ? `${scores.length} ratings: too few to tell how good the agent is`
      : `${scores.length} ratings, ${mean.toFixed(2)} on average`;
    const rows = found.reverse().slice(0, 200)
      .map((one) => [when(one.createdAt), JSON.stringify(one.prompt), one.response, String(one.score), one.notes]);
    const { leastConversations, versions } = await call("GET", `${base}/agents/${encodeURIComponent(agent)}/satisfaction`);
    shown.replaceChildren(element("p", {}, told), satisfied(leastConversations, versions),
      table("Newest ratings", ["When", "Prompt", "Response", "Score", "Notes"], rows));
  };
  const parts = [element("h2", {}, "Feedback"),
    form("Show", act, field("Agent", "agent", { required: true, maxlength: 39 })), shown];
  if (role !== "viewer") parts.push(...rating(base));
  return parts;
}

// Thumbs-up over all conversations of a version: of those who rate, more are content or cross than of the others.
function satisfied(least, versions) {
  const share = (value) => `${(100 * value).toFixed(0)} %`;
  const rows = versions.map((one) => [
    String(one.version),
    one.satisfaction === null ? `cannot tell, below ${least} conversations`
      : `${share(one.satisfaction)} (${share(one.low)} to ${share(one.high)})`,
    one.ratingRate === null ? "–" : share(one.ratingRate), String(one.conversations), String(one.rated),
  ]);
  return table("Satisfaction with versions", ["Version", "Thumbs-up of all conversations", "Rated", "Conversations", "Ratings"], rows);
}

function rating(base) {
  const told = element("p", { role: "status", "aria-label": "Rated" });
  let count = 0;
  const act = async ({ agent, prompt, response, score, notes }) => {
    const body = { prompt, response, score: Number(score), notes };
    await call("POST", `/api/policies/feedback/${encodeURIComponent(agent)}`, body, base.split("/").at(-1));
    count += 1;
    told.textContent = `${count} stored`;
  };
  return [element("h3", {}, "Rate an answer"),
    form("Rate", act, field("Of agent", "agent", { required: true, maxlength: 39 }),
      field("Prompt", "prompt", { required: true }), field("Response", "response", { required: true }),
      field("Score, 0 to 1", "score", { type: "number", min: 0, max: 1, step: 0.1, required: true }),
      field("Notes", "notes")), told];
}

export async function people({ base, role, again }) {
  const { members } = await call("GET", `${base}/members`);
  const remove = (one) => button(`remove ${one.name}`, async () => {
    await call("DELETE", `${base}/members/${one.user}`);
    await again();
  });
  const parts = [element("h2", {}, "People"), table("Members", ["Name", "Role", "Since", "Decide"],
    members.map((one) => [one.name, one.role, when(one.since), role === "owner" ? remove(one) : "–"]))];
  if (role === "owner") parts.push(...(await owners(base, again)));
  return parts;
}

async function owners(base, again) {
  const { tokens } = await call("GET", `${base}/tokens`);
  const secret = element("p", { role: "status" });
  const show = (text) => { secret.textContent = `Shown this once: ${text}`; };
  const revoke = (one) => button(`revoke ${one.name}`, async () => {
    await call("DELETE", `${base}/tokens/${one.id}`);
    await again();
  });
  const rows = tokens.map((one) => [one.name, one.role, when(one.created), one.revoked ? "revoked" : revoke(one)]);
  return [
    element("h3", {}, "Invite somebody"),
    form("Invite", async ({ role }) => { show((await call("POST", `${base}/invitations`, { role })).invitation); },
      choice("Role", "role", ["viewer", "editor", "owner"])),
    table("Tokens of programs", ["Name", "Role", "Made", "Decide"], rows),
    form("Make a token", async ({ name, role }) => { show((await call("POST", `${base}/tokens`, { name, role })).token); },
      field("Name of the program", "name", { required: true, maxlength: 64 }),
      choice("Role of the program", "role", ["viewer", "editor"])),
    secret,
  ];
}

export async function audit({ base }) {
  const { entries } = await call("GET", `${base}/audit`);
  return [element("h2", {}, "Audit"), table("Who did what, newest first", ["When", "Who", "What", "Of what"],
    entries.map((one) => [when(one.time), one.by, one.action, one.subject]))];
}
