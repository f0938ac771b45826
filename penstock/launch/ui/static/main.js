// Shows a live run. The address names the run and those that it is compared with:
// #/run/NAME?with=OTHER&with=ANOTHER, or #/start for the form that starts one.

import { Chart } from "/chart.js";
import { byId, count, decimal, duration, element, fillTable, isKnown, moment, rate, say } from "/dom.js";
import { drawFlow } from "/flow.js";
import { listRuns } from "/runs.js";
import { showStart } from "/start.js";
import { decisions, showSteering } from "/steer.js";
import { offerThemes } from "/theme.js";

const AGAIN_MS = 2000;
const COLOURS = 8;
const MOST_COMPARED = 16;
const shown = { runs: [], curves: new Map(), axis: "env_steps", detail: null, versions: null, canAct: false };
let source = null;
const charts = {
  mean_return: new Chart(byId("return"), { label: "Return", fromZero: false }),
  rate: new Chart(byId("rate"), { label: "Environment steps per second", fromZero: true }),
  staleness: new Chart(byId("staleness"), { label: "Staleness in updates", fromZero: true }),
};

// ---- where we are

const isStart = () => location.hash === "#/start";

function route() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const name = path.startsWith("/run/") ? decodeURIComponent(path.slice(5)) : "";
  return { name, compared: new URLSearchParams(query).getAll("with") };
}

function address(name, compared) {
  const query = new URLSearchParams(compared.map((other) => ["with", other])).toString();
  return `#/run/${encodeURIComponent(name)}${query ? `?${query}` : ""}`;
}

function toggle(name) {
  const { name: chosen, compared } = route();
  const others = compared.includes(name) ? compared.filter((one) => one !== name) : [...compared, name];
  location.hash = address(chosen, others);
}

// ---- listening

// Opens the stream of the address, and closes the former one, so that none of its events are shown any more.
function listen() {
  source?.close();
  source = null;
  if (document.hidden) return;
  const { name, compared } = route();
  const query = new URLSearchParams(compared.slice(0, MOST_COMPARED).map((other) => ["with", other]));
  if (name) query.set("run", name);
  const opened = new EventSource(`/api/events?${query}`);
  source = opened;
  shown.curves.clear();
  Object.assign(shown, { detail: null, versions: null });
  for (const [kind, show] of Object.entries(NEWS)) {
    opened.addEventListener(kind, (event) => {
      say(byId("connection"), "");
      show(JSON.parse(event.data));
    });
  }
  opened.addEventListener("error", () => {
    say(byId("connection"), "Connection lost; trying again …");
    if (opened.readyState === EventSource.CLOSED) setTimeout(() => source === opened && listen(), AGAIN_MS);
  });
}

const NEWS = {
  runs({ folder, runs, can_act: canAct }) {
    Object.assign(shown, { runs, canAct });
    say(byId("folder"), folder);
    byId("start-link").hidden = !canAct;
    if (isStart()) return showForm();
    if (!route().name && runs.length) {
      history.replaceState(null, "", address(runs[0].name, []));
      return listen();
    }
    const { name, compared } = route();
    listRuns(runs, { chosen: name, compared, address: (one) => address(one, compared), toggle });
    if (!name) showNothing("No runs yet", `Start one: penstock train CartPole-v1 --ui. They are looked for in ${folder}.`);
    else if (shown.detail) showBeside();
    return undefined;
  },
  run(detail) {
    shown.detail = detail;
    byId("empty").hidden = true;
    byId("run").hidden = false;
    showRun(detail);
    showSteering(byId("steer"), detail.run, shown.canAct);
    showBeside();
  },
  curve({ name, columns }) {
    shown.curves.set(name, columns);
    if (shown.detail) showBeside();
  },
  versions(found) {
    shown.versions = found;
    showVersions(found);
  },
  trouble({ run, status, detail }) {
    if (status !== 404) say(byId("connection"), detail);
    else if (run === route().name) showNothing("No such run", `${detail}. Choose one from the list.`);
  },
};

function showBeside() {
  showCurves(comparedNames());
  showComparison(comparedNames());
}

// The shown run, and the compared ones whose curves have arrived.
function comparedNames() {
  const { name, compared } = route();
  return [name, ...compared.filter((one) => one !== name)].filter((one) => shown.curves.has(one));
}

// ---- showing

async function showForm() {
  byId("run").hidden = true;
  byId("empty").hidden = true;
  byId("start").hidden = false;
  listRuns(shown.runs, { chosen: "", compared: [], address: (one) => address(one, []), toggle });
  await showStart(byId("start"), (name) => { location.hash = address(name, []); });
}

function showNothing(title, text) {
  byId("run").hidden = true;
  byId("empty").hidden = false;
  say(byId("empty").querySelector("h2"), title);
  say(byId("empty").querySelector("p"), text);
}

function showRun({ run, now, summary }) {
  document.title = `${run.name} – Penstock`;
  say(byId("name"), run.name);
  say(byId("state"), run.state);
  byId("state").className = `pill ${run.state}`;
  say(byId("about"), run.why || `${run.environment}, seed ${run.seed}, begun ${moment(run.started)}`);
  showVerdict(now?.bottleneck, summary, run);
  showTiles(run, now);
  say(byId("window"), now ? `means over ${decimal(now.flow.window_s)} s` : "");
  drawFlow(byId("flow"), now, run.environment);
  fillTable(byId("roles"), ["Role", "Well", "Health", "Rate", "Lag", "Version", { text: "Restarts", kind: "number" }],
    (now?.roles ?? []).map((row) => [row.role, `${row.healthy} of ${row.of}`, health(row), row.rate, row.lag, row.version,
      { text: String(row.restarts), kind: "number" }]),
    "No process of this run is alive.");
}

const health = (row) =>
  row.problems.length ? { text: row.problems.join("; "), kind: "bad" } : { text: "ok", kind: "good" };

function showVerdict(bottleneck, summary, run) {
  const place = byId("verdict");
  const stuck = bottleneck?.stands_still;
  const slow = bottleneck?.bound.endsWith("-bound");
  place.className = `verdict ${stuck ? "stuck" : slow ? "slow" : run.state === "solved" ? "good" : ""}`;
  const words = bottleneck ? [bottleneck.bound, bottleneck.reason] : ending(summary, run);
  const text = words.join(": ");
  if (place.textContent === text) return;
  place.replaceChildren(element("strong", {}, words[0]), words[1] ? `: ${words[1]}` : "");
}

function ending(summary, run) {
  if (run.state === "running" || !summary) return run.state === "ended" ? ["ended", "its launcher was killed; no summary was written"] : [""];
  if (summary.failure) return ["failed", summary.failure];
  const played = summary.evaluation;
  return [run.state, played ? `evaluation ${decimal(played.mean)} ± ${decimal(played.std)} over ${played.episodes} episodes of version ${played.version}` : "no evaluation"];
}

function showTiles(run, now) {
  const goal = isKnown(run.target_return) ? ` of ${decimal(run.target_return)}` : "";
  const tiles = [
    ["Return", decimal(run.mean_return), goal],
    ["Rate", rate(now ? now.flow.environment_steps ?? run.steps_per_second : run.steps_per_second), " steps/s"],
    ["Steps", count(run.env_steps), ""],
    ["Updates", count(run.updates), ""],
    ["Published", count(run.publications ?? run.version), " versions"],
    ["Training", duration(run.training_seconds), ""],
  ];
  byId("tiles").replaceChildren(...tiles.map(([name, value, unit]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, element("small", {}, unit)))));
}

function showCurves(names) {
  const columns = names.map((name) => shown.curves.get(name));
  const options = { axis: shown.axis };
  for (const [value, chart] of Object.entries(charts)) {
    const series = names.map((name, index) => ({ name, colour: index % COLOURS, x: columns[index][shown.axis], y: columns[index][value] }));
    chart.update(series, value === "mean_return" ? { ...options, target: shown.detail.run.target_return } : options);
  }
  byId("legend").hidden = names.length < 2;
  byId("legend").replaceChildren(...names.map((name, index) =>
    element("li", {}, element("span", { class: `swatch s${index % COLOURS}` }), name)));
}

function showComparison(names) {
  byId("comparison-card").hidden = names.length < 2;
  const number = (text) => ({ text, kind: "number" });
  const runs = names.map((name) => shown.runs.find((run) => run.name === name)).filter(Boolean);
  fillTable(byId("comparison"), ["Run", "State", "Environment", number("Seed"), number("Steps"), number("Return"), number("Steps/s"), number("Training")],
    runs.map((run) => [run.name, run.state, run.environment, number(count(run.seed)), number(count(run.env_steps)),
      number(decimal(run.mean_return)), number(rate(run.steps_per_second)), number(duration(run.training_seconds))]), "");
}

function showVersions({ versions, traffic, note }) {
  const shares = traffic ? `canary ${decimal(100 * traffic.canary_share)}%, newest ${decimal(100 * traffic.latest_share)}%, active the rest` : "";
  say(byId("traffic"), versions.length ? shares : "");
  fillTable(byId("versions"), [{ text: "Version", kind: "number" }, "Status", "Origin", { text: "Update", kind: "number" }, "Evaluation", "Registered", "Reason", ...(shown.canAct ? ["Decide"] : [])],
    versions.map((one) => [{ text: count(one.version), kind: "number" }, one.standby ? `${one.status} (standby)` : one.status, one.origin,
      { text: count(one.update), kind: "number" },
      one.evaluation ? `${decimal(one.evaluation.mean)} ± ${decimal(one.evaluation.std)} over ${one.evaluation.episodes}` : "–",
      one.created.slice(0, 19).replace("T", " "), { text: one.reason || "–", kind: "long" }, ...(shown.canAct ? [decisions(route().name, one)] : [])]),
    note || "No version is registered yet; a learner registers its best and its last.");
}

// ---- life

byId("axis").addEventListener("change", (event) => {
  shown.axis = event.target.value;
  if (shown.detail) showCurves(comparedNames());
});
byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
addEventListener("hashchange", () => {
  byId("start").hidden = !isStart();
  listen();
});
document.addEventListener("visibilitychange", listen);
offerThemes(byId("theme"));
listen();
