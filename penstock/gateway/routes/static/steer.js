// Orders of an editor for a live run: pause, resume, stop, checkpoints, flushes.

import { call } from "./api.js";
import { button, element, field, form } from "./elements.js";

const LOOK_MS = 500;
const PENDING = "COMMAND_STATE_PENDING";

export function steering(path) {
  const told = element("p", { role: "status", "aria-label": "What the run answered" });
  const order = (action) => button(action, async () => {
    const { desired } = await call("POST", `${path}/control/${action}`, {});
    told.textContent = `${action}: wanted is ${desired}`;
  });
  const asked = (action, body) => async (said) => {
    told.textContent = `${action}: the learner is asked…`;
    const found = await answered(`${path}/control/${action}`, body(said)).catch((error) => { told.textContent = ""; throw error; });
    told.textContent = `${action}: ${found.state.replace("COMMAND_STATE_", "").toLowerCase()} ${found.detail ?? ""}`;
  };
  const name = { required: true, maxlength: 64, pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]*", autocomplete: "off" };
  return element("section", {},
    element("div", { class: "row", role: "group", "aria-label": "Steer" },
      order("pause"), order("resume"), order("stop"), button("checkpoint", asked("checkpoint", () => ({}))),
      button("cancel", async () => { await call("POST", `${path}/cancel`); })),
    told,
    element("details", {}, element("summary", {}, "Named checkpoints, flush"),
      form("Keep a checkpoint", asked("checkpoint", (said) => ({ name: said.kept })), field("Name of the checkpoint", "kept", name)),
      form("Go back to it", asked("restore", (said) => ({ name: said.back })), field("Go back to", "back", name)),
      form("Flush", asked("flush", (said) => ({ minSteps: Number(said.steps) })),
        field("Steps at least", "steps", { type: "number", min: 1, value: 1, required: true }))));
}

// Polls the same order until the learner has answered.
async function answered(path, body) {
  const requestId = crypto.getRandomValues(new Uint32Array(4)).join("-");
  for (;;) {
    const found = await call("POST", path, { ...body, requestId });
    if (found.state !== PENDING) return found;
    await new Promise((wake) => { setTimeout(wake, LOOK_MS); });
  }
}

// A form for the share of the clients of each version.
export function traffic(path, now) {
  const share = { type: "number", min: 0, max: 1, step: "any" };
  const number = (text) => (text === "" ? undefined : Number(text));
  return element("details", {}, element("summary", {}, "Traffic"),
    form("Change the traffic", async ({ canary, latest, shadow }) => {
      await call("PUT", `${path}/traffic`, {
        canaryShare: number(canary), latestShare: number(latest), shadow: number(shadow), reason: "from the console",
      });
    },
    field("Share of the canary", "canary", { ...share, value: now?.canary_share }),
    field("Share of the newest", "latest", { ...share, value: now?.latest_share }),
    field("Shadow version, 0 for none", "shadow", { type: "number", min: 0, step: 1, value: now?.shadow ?? undefined })));
}
