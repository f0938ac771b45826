// Trainings: starts them from templates, follows and steers them, and shows their versions.

import { Refused, call, events, keepFile } from "./api.js";
import { button, choice, element, field, form, guarded, shape, table, when } from "./elements.js";
import { steering, traffic } from "./steer.js";

const OPEN = new Set(["queued", "running"]);
const IN_USE = new Set(["active", "canary"]);
const NEWEST = 8;

// workload: of the shown jobs; default: all. The list follows changes.
export async function jobs({ base, project, role, signal, again, workload }) {
  const [{ jobs: every }, { templates: offered }] = await Promise.all([
    call("GET", `${base}/jobs`), call("GET", `${base}/templates`),
  ]);
  const templates = offered.filter((one) => workload === undefined || one.model.workload === workload);
  const list = element("div", {});
  const show = (found) => refill(list, listed(project, found.filter(
    (one) => workload === undefined || templates.some(({ name }) => name === one.template))));
  show(every);
  guarded(() => live(base, "", signal, { jobs: (news) => show(news.jobs) }));
  const parts = [element("h2", {}, "Jobs"), list];
  if (role !== "viewer" && templates.length) parts.push(starting(base, project, templates, again));
  return parts;
}

function listed(project, found) {
  return table("Newest first", ["Agent", "Template", "State", "Cause", "Asked for", "Ended"], found.map((one) => [
    element("a", { href: `#/${project}/jobs/${one.id}` }, one.agent),
    one.template, one.state, one.cause || "–", when(one.created), when(one.ended),
  ]));
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
      const found = await call("POST", `${base}/estimates`, body).catch((error) => { estimate.textContent = ""; throw error; });
      estimate.textContent = estimated(found);
    }));
  return element("section", {}, element("h2", {}, "Start a training"), made, estimate);
}

// The result of a dry run: time, memory, and the ratings that would be used.
function estimated({ seconds, memory_bytes: used, available, facts: { feedbackCount, scoreMean, scoreStd } }) {
  const gigabytes = (bytes) => (bytes / 2 ** 30).toFixed(1);
  const scores = scoreMean === null ? "" : `, ${scoreMean?.toFixed(2)} ± ${scoreStd?.toFixed(2)}`;
  return [
    `About ${(seconds / 60).toFixed(1)} minutes, with ${gigabytes(used)} GiB of memory at most; `
      + `${gigabytes(available.memory_bytes)} GiB are free.`,
    feedbackCount ? `It learns from ${feedbackCount} ratings${scores}.` : "",
  ].filter(Boolean).join(" ");
}

// A live job: each part of the page is redrawn when the gateway sends a change of it.
export async function job({ base, role, signal }, id) {
  const path = `${base}/jobs/${id}`;
  const found = await call("GET", path);
  const state = element("strong", { id: "state" });
  const cause = element("span", {});
  const [ended, steer, every, split, curve] = ["result", "steer", "versions", "traffic", "curve"]
    .map((name) => element("div", { class: name }));
  const log = element("pre", { tabindex: "0", role: "log", "aria-label": "Log" });
  const show = (now) => {
    state.textContent = now.state;
    cause.textContent = now.cause;
    refill(ended, ...(now.result ? [result(now.result)] : []));
    const isSteered = role !== "viewer" && OPEN.has(now.state);
    if (isSteered !== steer.hasChildNodes()) refill(steer, ...(isSteered ? [steering(path)] : []));
  };
  show(found);
  guarded(() => follow(path, signal, log));
  guarded(() => live(base, id, signal, {
    job: show,
    curve: (columns) => refill(curve, drawn(columns)),
    versions: (news) => {
      refill(every, versions(path, role, news, every.querySelector("details")?.open));
      if (role !== "viewer" && news.versions.length && !split.hasChildNodes()) split.append(traffic(path, news.traffic));
    },
    trouble: ({ of, detail }) => refill(of === "curve" ? curve : every, element("p", {}, detail)),
  }));
  return [element("h2", {}, `Training of ${found.agent}`),
    element("p", {}, "State: ", state, " ", cause),
    element("p", {}, `From ${found.template}, `, JSON.stringify(found.numbers)),
    ended, steer, every, split, element("h3", {}, "Curve"), curve, element("h3", {}, "Log"), log];
}

async function follow(path, signal, log) {
  for await (const { event, data } of events(`${path}/log`, signal)) {
    if (event === "line") {
      log.append(`${data}\n`);
      log.scrollTop = log.scrollHeight;
    } else if (event === "refused") throw new Error(data);
  }
}

const SCALES = { rewardMean: " (−1 is a rating of 0, 1 a rating of 1, and it goes beyond both)" };

function result(found) {
  const rows = Object.entries(found).map(([key, value]) => [key, String(value) + (SCALES[key] ?? "")]);
  return table("Result", ["What", "Value"], rows);
}

// The versions, newest first, with buttons to promote them; older unused ones are folded, unless `open`.
function versions(path, role, found, open) {
  const decide = (action, body) => async () => { await call("POST", `${path}/${action}`, body); };
  const reason = "from the console";
  const row = (one) => [
    one.label ? `${one.label} (${one.version})` : String(one.version), one.status, one.origin,
    one.evaluation ? `${one.evaluation.mean.toPrecision(4)} ± ${one.evaluation.std.toPrecision(3)}` : "–",
    role === "viewer" ? "–" : element("div", { class: "row" },
      button(`promote ${one.version}`, decide("promote", { version: one.version, reason })),
      button(`roll back ${one.version}`, decide("rollback", { version: one.version, reason })),
      button(`download ${one.version}`, () => keepFile(`${path}/versions/${one.version}/weights`))),
  ];
  const every = [...found.versions].reverse();
  const isShown = (one, place) => place < NEWEST || IN_USE.has(one.status);
  const older = every.filter((...which) => !isShown(...which));
  const columns = ["Version", "Status", "Origin", "Evaluation", "Decide"];
  return element("div", {}, table("Versions", columns, every.filter(isShown).map(row)),
    older.length ? element("details", { open }, element("summary", {}, `${older.length} older versions`),
      table("Older versions", columns, older.map(row))) : "");
}

// The events of a project; a broken stream is opened again.

const AGAIN_MS = 2000;
const PASSING = new Set([429, 502, 503, 504]);

// job: the shown job, "" for none. shown: a function for each kind of event. Returns when `signal` aborts; throws refusals.
async function live(base, job, signal, shown) {
  const path = `${base}/events?job=${encodeURIComponent(job)}`;
  while (!signal.aborted) {
    try {
      for await (const { event, data } of events(path, signal)) {
        if (event === "refused") throw new Refused(401, { detail: data });
        shown[event]?.(data);
      }
    } catch (error) {
      if (signal.aborted || (error instanceof Refused && !PASSING.has(error.status))) throw error;
    }
    await new Promise((wake) => { setTimeout(wake, AGAIN_MS); });
  }
}

// Replaces the content of a place, and keeps the keyboard focus.
function refill(place, ...children) {
  const had = place.contains(document.activeElement) ? document.activeElement : null;
  place.replaceChildren(...children);
  if (had === null || had === place) return;
  [...place.querySelectorAll(had.tagName)].find((one) => one.textContent === had.textContent
    && one.getAttribute("href") === had.getAttribute("href"))?.focus();
}

// The mean return of a training over its updates, as a picture with a caption.

const WIDTH = 600;
const HEIGHT = 160;

function drawn({ updates, meanReturn }) {
  const points = updates.map((one, index) => [one, meanReturn[index]]).filter(([, value]) => value !== null);
  if (points.length === 0) return element("p", {}, "Nothing is measured yet.");
  const [last, value] = points.at(-1);
  const told = `Mean return ${value.toPrecision(4)} after ${last} updates`;
  return element("figure", {}, picture(points, told), element("figcaption", {}, told));
}

function picture(points, told) {
  const low = Math.min(...points.map(([, value]) => value));
  const span = Math.max(...points.map(([, value]) => value)) - low || 1;
  const end = points.at(-1)[0] || 1;
  const place = ([update, value]) =>
    `${((update / end) * WIDTH).toFixed(1)},${(HEIGHT - ((value - low) / span) * HEIGHT).toFixed(1)}`;
  const line = shape("polyline", { points: points.map(place).join(" ") });
  const made = shape("svg", { viewBox: `0 -4 ${WIDTH} ${HEIGHT + 8}`, role: "img", "aria-label": told });
  made.append(line);
  return made;
}
