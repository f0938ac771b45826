// Members of the project, and its audit.

import { call } from "./api.js";
import { button, choice, element, field, form, table, when } from "./elements.js";

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
