// Asks the launcher once a second and shows what it says. The address names the run and what it is compared with:
// #/run/NAME?with=OTHER&with=ANOTHER. Nothing here changes a run.

import { Chart } from "/chart.js";
import { byId, count, decimal, duration, element, fillTable, isKnown, moment, rate, say } from "/dom.js";
import { drawFlow } from "/flow.js";
import { listRuns } from "/runs.js";
import { offerThemes } from "/theme.js";

const INTERVAL_MS = 1000;
const COLOURS = 8;
const shown = { runs: [], curves: new Map(), axis: "env_steps", detail: null, turn: 0 };
const charts = {
  mean_return: new Chart(byId("return"), { label: "Return", fromZero: false }),
  rate: new Chart(byId("rate"), { label: "Environment steps per second", fromZero: true }),
  staleness: new Chart(byId("staleness"), { label: "Staleness in updates", fromZero: true }),
};

// ---- where we are

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

// ---- asking

async function ask(path) {
  const reply = await fetch(path);
  if (!reply.ok) throw Object.assign(new Error(detailOf(await reply.text()) ?? reply.statusText), { status: reply.status });
  return reply.json();
}

function detailOf(text) {
  try {
    return JSON.parse(text).detail;
  } catch {
    return undefined; // what failed said so in words
  }
}

async function refresh() {
  const turn = ++shown.turn;
  try {
    const { folder, runs } = await ask("/api/runs");
    say(byId("folder"), folder);
    shown.runs = runs;
    if (!route().name && runs.length) history.replaceState(null, "", address(runs[0].name, []));
    const { name, compared } = route();
    listRuns(runs, { chosen: name, compared, address: (one) => address(one, compared), toggle });
    if (!name) showNothing("No runs yet", `Start one: penstock train CartPole-v1 --ui. They are looked for in ${folder}.`);
    else await refreshRun(name, compared, turn);
    say(byId("connection"), "");
  } catch (error) {
    if (error.status === 404) showNothing("No such run", `${error.message}. Choose one from the list.`);
    else say(byId("connection"), error.status ? error.message : "Connection lost; trying again …");
  }
}

async function refreshRun(name, compared, turn) {
  const part = `/api/runs/${encodeURIComponent(name)}`;
  const names = [name, ...compared.filter((one) => one !== name && shown.runs.some((run) => run.name === one))];
  const [detail, versions] = await Promise.all([ask(part), ask(`${part}/versions`), ...names.map(refreshCurve)]);
  if (turn !== shown.turn) return;
  shown.detail = detail;
  byId("empty").hidden = true;
  byId("run").hidden = false;
  showRun(detail);
  showCurves(names);
  showComparison(names);
  showVersions(versions);
}

async function refreshCurve(name) {
  const run = shown.runs.find((one) => one.name === name);
  const seal = run && run.state !== "running" ? `${run.state} ${run.env_steps}` : null;
  if (seal && shown.curves.get(name)?.seal === seal) return;
  shown.curves.set(name, { seal, columns: await ask(`/api/runs/${encodeURIComponent(name)}/curve`) });
}

// ---- showing

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
  const columns = names.map((name) => shown.curves.get(name).columns);
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
  fillTable(byId("versions"), [{ text: "Version", kind: "number" }, "Status", "Origin", { text: "Update", kind: "number" }, "Evaluation", "Registered", "Reason"],
    versions.map((one) => [{ text: count(one.version), kind: "number" }, one.standby ? `${one.status} (standby)` : one.status, one.origin,
      { text: count(one.update), kind: "number" },
      one.evaluation ? `${decimal(one.evaluation.mean)} ± ${decimal(one.evaluation.std)} over ${one.evaluation.episodes}` : "–",
      one.created.slice(0, 19).replace("T", " "), { text: one.reason || "–", kind: "long" }]),
    note || "No version is registered yet; a learner registers its best and its last.");
}

// ---- life

byId("axis").addEventListener("change", (event) => {
  shown.axis = event.target.value;
  refresh();
});
byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
addEventListener("hashchange", refresh);
document.addEventListener("visibilitychange", () => document.hidden || refresh());
offerThemes(byId("theme"));

async function live() {
  if (!document.hidden) await refresh();
  setTimeout(live, INTERVAL_MS);
}
live();
