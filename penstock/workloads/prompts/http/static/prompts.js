// The page of one prompt: shows what the policy would do to it, with which result, and takes ratings.

import { Refused, call, takeToken } from "./api.js";
import { differences } from "./differences.js";
import { button, element, field, form, guarded, table } from "./elements.js";

const STEPS = 5;
const SCORES = [1, 2, 3, 4, 5];
const [door, asked, found, checks] = ["door", "asked", "found", "checks"].map((id) => document.getElementById(id));

const KINDS = { same: "span", new: "ins", gone: "del" };
const shown = (number) => (number === null ? "–" : `${number >= 0 ? "+" : "−"}${Math.abs(number).toFixed(3)}`);

function difference(before, after, label) {
  return element("pre", { tabindex: "0", role: "region", "aria-label": label },
    differences(before, after).map((part) => element(KINDS[part.kind], {}, part.text)));
}

// Waiting checks are shown even if the prompt fails: they may be the reason that there is no reward.
async function look(prompt) {
  try {
    await show(prompt);
  } finally {
    await showChecks();
  }
}

async function show(prompt) {
  const [state, feedback] = await Promise.all([
    call("POST", "/embed", { prompt, encoding: "base64" }),
    call("GET", "/checks"),
  ]);
  const [likely, made, best] = await Promise.all([
    call("POST", "/get_distribution", { embedding: state.embedding }),
    Promise.all([0, 1, 2, 3, 4].map((action) => call("POST", "/mutate", { prompt, action, rewarded: false }))),
    optimize(prompt, feedback.rewarded_by === "ratings"),
  ]);
  found.replaceChildren(
    element("h2", {}, "Category"), element("p", { id: "category" }, state.category),
    element("h2", {}, "Mutations"), distribution(likely),
    element("div", {}, made.map((one) => element("details", {},
      element("summary", {}, one.changed ? `What ${one.mutation_type} does` : `${one.mutation_type} changes nothing`),
      difference(prompt, one.prompt, `What ${one.mutation_type} does`)))),
    element("div", { id: "path" }));
  showPath(prompt, best, feedback.rewarded_by);
}

const optimize = (prompt, explore) => call("POST", "/optimize", { prompt, steps: STEPS, explore });

function distribution(likely) {
  return table("How likely each mutation is", ["mutation", "probability", "as a bar"], likely.mutation_types.map((name, at) => [
    name,
    element("span", { class: "score" }, `${(100 * likely.probabilities[at]).toFixed(1)} %`),
    element("meter", { min: "0", max: "1", value: likely.probabilities[at], "aria-label": name }),
  ]));
}

// drawn: the path was sampled, so that a rating of it can be used for training.
function showPath(prompt, best, rewardedBy, drawn = rewardedBy === "ratings") {
  let sum = 0;
  const rows = best.path.map((step, at) => {
    sum += step.reward ?? 0;
    return [
      at + 1, step.mutation_type,
      element("span", { class: "score" }, shown(step.reward)),
      element("span", { class: "score" }, step.reward === null ? "–" : shown(sum)),
    ];
  });
  const name = drawn ? "A path that was drawn" : "Best path";
  document.getElementById("path").replaceChildren(
    element("h2", {}, name),
    table(`${name}, reward by step`, ["step", "mutation", "reward", "so far"], rows),
    difference(prompt, best.prompt, "The prompt that it leads to"),
    rating(best.id),
    button("Draw another path", async () => showPath(prompt, await optimize(prompt, true), rewardedBy, true)));
}

function rating(id) {
  const said = element("p", { role: "status", id: "rated" }, "");
  const rate = async (score) => {
    const kept = await call("POST", "/rate", { id, score: (score - 1) / 4 });
    said.textContent = kept.learned > 0
      ? `Kept: ${score} of 5, and ${kept.learned} steps wait to be learned from.`
      : `Kept: ${score} of 5.`;
    buttons.forEach((one) => { one.disabled = true; });
  };
  const buttons = SCORES.map((score) => button(`${score}`, () => rate(score)));
  buttons.forEach((one, at) => one.setAttribute("aria-label", `${SCORES[at]} of 5`));
  return element("div", {},
    element("p", { id: "question" }, "How good is this prompt? 1 is bad, 5 is good."),
    element("div", { class: "row", role: "group", "aria-labelledby": "question" }, buttons), said);
}

async function showChecks() {
  const state = await call("GET", "/checks");
  if (state.every === 0) return;
  const told = element("p", {}, `People agreed with ${state.agreed} of ${state.checked} rewards that they checked; `
    + `one of ${state.every} is asked about.`);
  const one = state.waiting[0];
  checks.replaceChildren(element("h2", {}, "Checks"), told, one === undefined
    ? element("p", {}, "Nothing waits for you.")
    : element("div", {},
      element("p", {}, `Of the prompt “${one.start.slice(0, 200)}”: which of these is better?`),
      element("div", { class: "texts" }, ["before", "after"].map((which) => element("div", {},
        element("pre", { tabindex: "0", role: "region", "aria-label": which }, one[which]),
        button(`The one ${which} is better`, async () => {
          await call("POST", "/checks", { id: one.id, better: which });
          await showChecks();
        }))))));
}

function begin() {
  asked.replaceChildren(form("Look", ({ prompt }) => opened(() => look(prompt)),
    element("label", {}, "Prompt",
      element("textarea", { name: "prompt", required: true, maxlength: "20000", spellcheck: "true" }))));
  guarded(() => opened(showChecks));
}

// Asks for a token if the server requires one, and continues with it.
async function opened(act) {
  try {
    await act();
    door.hidden = true;
  } catch (error) {
    if (!(error instanceof Refused) || error.status !== 401) throw error;
    door.hidden = false;
    door.replaceChildren(form("Go on", async ({ token }) => {
      takeToken(token);
      await opened(act);
    }, field("Token of the project", "token", { type: "password", required: true, autocomplete: "off" })));
  }
}

begin();
