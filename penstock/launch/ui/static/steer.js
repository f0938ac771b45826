// Buttons that steer a run and promote or withdraw its versions; refusals are shown as text.

import { call } from "/api.js";
import { byId, element, say } from "/dom.js";

const ORDERS = ["pause", "resume", "checkpoint", "stop"];
const REASON = "from the page";

// run: its row. Rewritten only for another run.
export function showSteering(place, run, canAct) {
  place.hidden = !canAct || run.state !== "running";
  if (place.dataset.run === run.name) return;
  place.dataset.run = run.name;
  place.replaceChildren(...ORDERS.map((order) =>
    pressed(order, () => call("POST", `/api/runs/${encodeURIComponent(run.name)}/control/${order}`, { reason: REASON }))));
}

// one: a version of the run of this name.
export function decisions(name, one) {
  const decide = (action) => () =>
    call("POST", `/api/runs/${encodeURIComponent(name)}/${action}`, { version: one.version, reason: REASON });
  return { kind: "row", text: element("span", { class: "row" },
    pressed(`promote ${one.version}`, decide("promote")), pressed(`roll back ${one.version}`, decide("rollback")),
    element("a", { href: `/api/runs/${encodeURIComponent(name)}/versions/${one.version}/weights`, download: "" }, `download ${one.version}`)) };
}

function pressed(text, act) {
  const button = element("button", { type: "button" }, text);
  button.addEventListener("click", async () => {
    say(byId("told"), "");
    button.disabled = true;
    try {
      await act();
      say(byId("told"), `${text}: asked for`);
    } catch (error) {
      say(byId("told"), error.message);
    } finally {
      button.disabled = false;
    }
  });
  return button;
}
