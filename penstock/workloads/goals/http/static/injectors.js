// Injectors: which live, how often their goals succeed, how sure they were, and what an operator may decide.

import { call } from "/console/api.js";
import { button, element, guarded, shape, table } from "/console/elements.js";

const LOOK_MS = 2000;
const WIDTH = 400;
const HEIGHT = 120;

const at = (seconds) => (seconds === null ? "never" : new Date(1000 * seconds).toLocaleString());
const share = (value) => (value === null ? "–" : `${Math.round(100 * value)} %`);

export async function injectors({ base, project, signal }) {
  const draw = ({ injectors: found }) => [
    table("Injectors", ["Injector", "State", "Auto", "Last heard", "Trouble"], found.map((one) => [
      keyed(element("a", { href: `#/${project}/injectors/${one.name}` }, one.name), one.name),
      one.state, one.auto ? "carries goals out" : "only proposes", at(one.seen), one.stopped ?? (one.trouble || "–"),
    ])),
  ];
  return [element("h2", {}, "Injectors"), await followed(`${base}/injectors`, signal, draw)];
}

export async function injector({ base, role, signal, again }, name) {
  const path = `${base}/injectors/${encodeURIComponent(name)}`;
  const draw = (found) => parts(found, path, role, again);
  return [element("h2", {}, `Injector ${name}`), await followed(path, signal, draw)];
}

// Returns a place that shows what is at an address, drawn anew when that changes, as long as it is looked at.
async function followed(path, signal, draw) {
  const place = element("div", {});
  let shown = await call("GET", path);
  place.replaceChildren(...draw(shown));
  guarded(async () => {
    for (;;) {
      await new Promise((wake) => { setTimeout(wake, LOOK_MS); });
      if (signal.aborted) return;
      const found = await call("GET", path);
      if (signal.aborted) return;
      if (JSON.stringify(found) !== JSON.stringify(shown)) redraw(place, draw(found));
      shown = found;
    }
  });
  return place;
}

// Draws anew without taking the keyboard away from what has it.
function redraw(place, made) {
  const held = place.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  place.replaceChildren(...made);
  if (held !== undefined) place.querySelector(`[data-key="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
}

function keyed(made, key) {
  made.dataset.key = key;
  return made;
}

function parts(found, path, role, again) {
  const { day } = found;
  return [
    element("p", { id: "state" }, `${found.state}, ${found.auto ? "carries goals out" : "only proposes"}`,
      found.version === null ? "" : `, version ${found.version}`, `; last heard ${at(found.seen)}`),
    ...(found.stopped ? [element("p", {}, `It has stopped itself: ${found.stopped}. An operator lets it go on with --resume.`)] : []),
    ...(found.trouble ? [element("p", {}, `Nothing was proposed: ${found.trouble}`)] : []),
    ...(role === "viewer" ? [] : [switching(found, path, again)]),
    figures([
      ["Goals an hour", day.perHour.toPrecision(3)], ["Proposed in 24 hours", day.proposed], ["Carried out", day.injected],
      ["Succeeded", day.succeeded], [`Success of the last ${found.success.of}`, share(found.success.share)],
      ["Held back", Object.entries(day.held).map(([why, count]) => `${why} ${count}`).join(", ") || "none"],
    ]),
    element("h3", {}, "How sure it was, of the goals of a day"), histogram(found.confidence, found.rules),
    element("p", {}, found.reliability === null ? "Too few outcomes to judge its probability of success."
      : `Its probability of success was off by ${found.reliability.gap.toFixed(2)} on average over the last ${found.reliability.outcomes} goals.`),
    goals(found.goals, path, role, again),
  ];
}

function switching(found, path, again) {
  const made = button(found.auto ? "Only propose" : "Carry goals out", async () => {
    await call("PUT", `${path}/auto`, { on: !found.auto });
    await again();
  });
  return element("div", { class: "row", role: "group", "aria-label": "Auto" }, keyed(made, "auto"));
}

function figures(pairs) {
  return element("dl", { class: "figures" }, pairs.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function goals(found, path, role, again) {
  const rows = found.map((one) => [
    at(one.timestamp), one.goal, one.confidence.toFixed(2), one.priority.toFixed(2),
    one.expected_reward === null ? "–" : one.expected_reward.toPrecision(3),
    one.vetoed && one.outcome === "waits" ? "vetoed" : one.outcome, one.reasoning,
    role !== "viewer" && one.mayVeto ? veto(one, path, again) : "–",
  ]);
  return table("The last twenty goals, newest first",
    ["Proposed", "Goal", "Certainty", "Success", "Expected", "Outcome", "Why", "Decide"], rows);
}

function veto(one, path, again) {
  return keyed(button(`veto ${one.goal}`, async () => {
    await call("POST", `${path}/vetoes`, { goalId: one.goal_id });
    await again();
  }), one.goal_id);
}

function histogram(counts, rules) {
  const most = Math.max(...counts, 1);
  const step = WIDTH / counts.length;
  const total = counts.reduce((sum, one) => sum + one, 0);
  const above = rules === null ? "" : `; from ${rules.threshold.toFixed(2)} on they are carried out`;
  const told = `${total} goals by certainty from 0 to 1: ${counts.join(", ")}${above}`;
  const picture = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 16}`, role: "img", "aria-label": told });
  counts.forEach((count, index) => {
    const tall = (count / most) * (HEIGHT - 12);
    picture.append(
      shape("rect", { x: index * step + 1, y: HEIGHT - tall, width: step - 2, height: tall }),
      words(index * step + step / 2, HEIGHT - tall - 2, count ? count : ""),
      words(index * step + step / 2, HEIGHT + 12, `${(index / counts.length).toFixed(1)}–`));
  });
  return element("figure", { class: "bars" }, picture, element("figcaption", {}, told));
}

function words(x, y, text) {
  const made = shape("text", { x, y, "aria-hidden": "true" });
  made.textContent = text;
  return made;
}
