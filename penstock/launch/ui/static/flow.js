// The stages of a fragment in a row, with the rate of each hop; the bottleneck is marked.

import { bytes, count, decimal, element, isKnown, milliseconds, rate } from "/dom.js";

const STAGE_OF = { "actor-bound": "actor", "learner-bound": "learner", "broker-bound": "broker", "pacing-bound": "log" };

// now: { bottleneck, roles, flow } of the run, or null if it has ended.
export function drawFlow(place, now, environment) {
  if (!now) {
    place.replaceChildren(element("p", { class: "standing" }, "Nothing flows: no process of this run is alive."));
    return;
  }
  const { flow, roles, bottleneck } = now;
  const problems = (role) => roles.filter((row) => row.role === role).flatMap((row) => row.problems);
  const of = (role) => roles.find((row) => row.role === role);
  const stage = (key, title, lines, ...more) =>
    stageOf(title, lines, STAGE_OF[bottleneck.bound] === key, problems(key === "log" ? "redis" : key), more);
  place.replaceChildren(
    element("ol", { class: "way" },
      stage("environment", "Environment", [environment, `${rate(flow.episodes)} episodes/s`]),
      hop(flow.environment_steps, "steps/s", ""),
      stage("actor", "Actors", [well(of("actor")), of("actor")?.version && `version ${of("actor").version}`]),
      hop(flow.fragments_sent, "fragments/s", isKnown(flow.ack_s) ? `ack ${milliseconds(flow.ack_s)}` : ""),
      stage("broker", "Broker", [well(of("broker")), isKnown(flow.append_s) && `append ${milliseconds(flow.append_s)}`]),
      hop(flow.fragments_appended, "fragments/s", isKnown(flow.bytes_appended) ? `${bytes(flow.bytes_appended)}/s` : ""),
      stage("log", "Log", [`${count(flow.waiting_fragments)} waiting`, `${bytes(flow.log_bytes)} held`], budget(flow)),
      hop(flow.trained_steps, "steps/s", ""),
      stage("learner", "Learner", [`${rate(flow.updates)} updates/s`, `staleness ${decimal(flow.staleness)}`]),
      back(flow),
    ),
  );
}

function stageOf(title, lines, isBound, problems, more) {
  const kind = problems.length ? "stage stuck" : isBound ? "stage bound" : "stage";
  const mark = problems.length ? element("em", {}, problems.length === 1 ? "not well" : `${problems.length} not well`)
    : isBound ? element("em", {}, "sets the pace") : null;
  const said = lines.filter(Boolean).map((line) => element("span", {}, line));
  return element("li", { class: kind }, element("h4", {}, title), ...said, ...more, mark);
}

function hop(value, unit, below) {
  return element("li", { class: value > 0 ? "hop moving" : "hop" },
    element("b", {}, `${rate(value)} ${unit}`), element("div", { class: "pipe" }), element("span", {}, below));
}

const well = (row) => (row ? `${row.healthy} of ${row.of} well` : "none");

function budget(flow) {
  if (!flow.budget_steps) return null;
  const text = `${count(flow.outstanding_steps)} of ${count(flow.budget_steps)} steps of the budget`;
  return element("meter", { min: 0, max: flow.budget_steps, value: Math.min(flow.outstanding_steps, flow.budget_steps), "aria-label": text, title: text });
}

function back(flow) {
  const applied = isKnown(flow.apply_s) ? `, applied in ${milliseconds(flow.apply_s)}` : "";
  return element("li", { class: flow.versions > 0 ? "back moving" : "back" },
    element("b", {}, `weights: version ${count(flow.version)}`), " ",
    element("span", {}, `${rate(flow.versions)} versions/s back to the actors${applied}`));
}
