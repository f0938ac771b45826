// Trainings: asked for from a template, followed, steered, and what versions came of them.

import { call, events } from "./api.js";
import { drawn } from "./curve.js";
import { button, choice, element, field, form, guarded, table, when } from "./elements.js";

const OPEN = new Set(["queued", "running"]);
const LOOK_MS = 2000;

// workload: of the jobs that are shown; left out: all.
export async function jobs({ base, project, role, again, workload }) {
  const [{ jobs: every }, { templates: offered }] = await Promise.all([
    call("GET", `${base}/jobs`), call("GET", `${base}/templates`),
  ]);
  const templates = offered.filter((one) => workload === undefined || one.model.workload === workload);
  const found = every.filter((one) => workload === undefined || templates.some(({ name }) => name === one.template));
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
  const asked = ({ agent, template, ...said }) => {
    const chosen = Object.entries(said).map(([key, value]) => [key.slice("number:".length), Number(value)]);
    return { agent, template, numbers: Object.fromEntries(chosen) };
  };
  const act = async (said) => {
    const made = await call("POST", `${base}/jobs`, asked(said));
    location.hash = `#/${project}/jobs/${made.id}`;
    await again();
  };
  const estimate = element("p", { role: "status", "aria-label": "Estimate" });
  const made = form("Start", act, field("Agent", "agent", { required: true, maxlength: 39 }), templateChoice, numbers,
    button("Estimate", async () => {
      estimate.textContent = "A dry run trains for some seconds…";
      const body = asked(Object.fromEntries(new FormData(made)));
      const { seconds } = await call("POST", `${base}/estimates`, body).catch((error) => { estimate.textContent = ""; throw error; });
      estimate.textContent = `About ${(seconds.likely / 60).toPrecision(2)} minutes, at most ${(seconds.high / 60).toPrecision(2)}.`;
    }));
  return element("section", {}, element("h2", {}, "Start a training"), made, estimate);
}

export async function job({ base, role, signal, again }, id) {
  const path = `${base}/jobs/${id}`;
  const found = await call("GET", path);
  const state = element("strong", { id: "state" }, found.state);
  const cause = element("span", {}, found.cause);
  const log = element("pre", { tabindex: "0", role: "log", "aria-label": "Log" });
  const parts = [element("h2", {}, `Training of ${found.agent}`),
    element("p", {}, "State: ", state, " ", cause),
    element("p", {}, `From ${found.template}, `, JSON.stringify(found.numbers))];
  if (found.result) parts.push(result(found.result));
  if (role !== "viewer" && OPEN.has(found.state)) parts.push(steering(path, again));
  if (found.began) parts.push(await versions(path, role, again));
  const curve = element("div", { class: "curve" });
  parts.push(element("h3", {}, "Curve"), curve, element("h3", {}, "Log"), log);
  guarded(() => follow(path, signal, log, again, OPEN.has(found.state)));
  guarded(() => watch(path, signal, curve, OPEN.has(found.state)));
  return parts;
}

async function follow(path, signal, log, again, wasOpen) {
  for await (const { event, data } of events(`${path}/log`, signal)) {
    if (event === "line") {
      log.append(`${data}\n`);
      log.scrollTop = log.scrollHeight;
    } else if (event === "refused") throw new Error(data);
    else if (wasOpen) await again();
  }
}

// Draws the curve anew every other second, as long as the training goes on and is looked at.
async function watch(path, signal, place, goesOn) {
  do {
    place.replaceChildren(drawn(await call("GET", `${path}/curve`)));
    await new Promise((wake) => { setTimeout(wake, LOOK_MS); });
  } while (goesOn && !signal.aborted);
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
    one.label ? `${one.label} (${one.version})` : String(one.version), one.status, one.origin,
    one.evaluation ? `${one.evaluation.mean.toPrecision(4)} ± ${one.evaluation.std.toPrecision(3)}` : "–",
    role === "viewer" ? "–" : element("div", { class: "row" },
      button(`promote ${one.version}`, decide("promote", { version: one.version, reason })),
      button(`roll back ${one.version}`, decide("rollback", { version: one.version, reason }))),
  ]);
  return table("Versions", ["Version", "Status", "Origin", "Evaluation", "Decide"], rows);
}
