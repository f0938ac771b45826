// Trainings: asked for from a template, followed, steered, and what versions came of them.

import { call, events } from "./api.js";
import { button, choice, element, field, form, guarded, table, when } from "./elements.js";

const OPEN = new Set(["queued", "running"]);

export async function jobs({ base, project, role, again }) {
  const [{ jobs: found }, { templates }] = await Promise.all([
    call("GET", `${base}/jobs`), call("GET", `${base}/templates`),
  ]);
  const rows = found.map((one) => [
    element("a", { href: `#/${project}/jobs/${one.id}` }, one.agent),
    one.template, one.state, one.cause || "–", when(one.created), when(one.ended),
  ]);
  const parts = [element("h2", {}, "Jobs"),
    table("Newest first", ["Agent", "Template", "State", "Cause", "Asked for", "Ended"], rows)];
  if (role !== "viewer" && templates.length) parts.push(starting(base, project, templates, again));
  return parts;
}

function starting(base, project, templates, again) {
  const numbers = element("div", {});
  const fill = (name) => {
    const chosen = templates.find((one) => one.name === name);
    numbers.replaceChildren(...Object.entries(chosen.numbers).map(([key, one]) =>
      field(`${key} (${one.least} to ${one.most})`, `number:${key}`,
        { type: "number", step: "any", min: one.least, max: one.most, value: one.default })));
  };
  const templateChoice = choice("Template", "template", templates.map((one) => one.name));
  templateChoice.addEventListener("change", (event) => fill(event.target.value));
  fill(templates[0].name);
  const act = async ({ agent, template, ...said }) => {
    const chosen = Object.entries(said).map(([key, value]) => [key.slice("number:".length), Number(value)]);
    const body = { agent, template, numbers: Object.fromEntries(chosen) };
    const made = await call("POST", `${base}/jobs`, body);
    location.hash = `#/${project}/jobs/${made.id}`;
    await again();
  };
  return element("section", {}, element("h2", {}, "Start a training"),
    form("Start", act, field("Agent", "agent", { required: true, maxlength: 39 }), templateChoice, numbers));
}

export async function job({ base, role, signal, again }, id) {
  const path = `${base}/jobs/${id}`;
  const found = await call("GET", path);
  const state = element("strong", { id: "state" }, found.state);
  const cause = element("span", {}, found.cause);
  const log = element("pre", { tabindex: "0", "aria-label": "Log" });
  const parts = [element("h2", {}, `Training of ${found.agent}`),
    element("p", {}, "State: ", state, " ", cause),
    element("p", {}, `From ${found.template}, `, JSON.stringify(found.numbers))];
  if (found.result) parts.push(result(found.result));
  if (role !== "viewer" && OPEN.has(found.state)) parts.push(steering(path, again));
  if (found.began) parts.push(await versions(path, role, again));
  parts.push(element("h3", {}, "Log"), log);
  guarded(() => follow(path, signal, log, again, OPEN.has(found.state)));
  return parts;
}

async function follow(path, signal, log, again, wasOpen) {
  for await (const { event, data } of events(`${path}/log`, signal)) {
    if (event === "line") {
      log.append(`${data}\n`);
      log.scrollTop = log.scrollHeight;
    } else if (wasOpen) await again();
  }
}

function result(found) {
  return table("Result", ["What", "Value"], Object.entries(found).map(([key, value]) => [key, String(value)]));
}

function steering(path, again) {
  const order = (action) => button(action, async () => { await call("POST", `${path}/control/${action}`, {}); });
  return element("div", { class: "row", role: "group", "aria-label": "Steer" },
    order("pause"), order("resume"), order("checkpoint"),
    button("cancel", async () => { await call("POST", `${path}/cancel`); await again(); }));
}

async function versions(path, role, again) {
  const found = await call("GET", `${path}/versions`);
  const decide = (action, body) => async () => { await call("POST", `${path}/${action}`, body); await again(); };
  const reason = "from the console";
  const rows = [...found.versions].reverse().map((one) => [
    String(one.version), one.status, one.origin,
    one.evaluation ? `${one.evaluation.mean.toPrecision(4)} ± ${one.evaluation.std.toPrecision(3)}` : "–",
    role === "viewer" ? "–" : element("div", { class: "row" },
      button(`promote ${one.version}`, decide("promote", { version: one.version, reason })),
      button(`roll back ${one.version}`, decide("rollback", { version: one.version, reason }))),
  ]);
  return table("Versions", ["Version", "Status", "Origin", "Evaluation", "Decide"], rows);
}
