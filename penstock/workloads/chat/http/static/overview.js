// For those who look after the chat: satisfaction by version, day and person, what answers, what was blocked, what was
// decided, how far the loop is; and what they decide themselves.

import { call } from "./calls.js";
import { button, element, field, table, when } from "./elements.js";
import { criteria, weighing } from "./weights.js";

const share = (number) => (number === null ? "–" : `${(100 * number).toFixed(0)} %`);

const satisfied = (one, least) => (one.satisfaction === null
  ? `cannot tell below ${least} conversations`
  : `${share(one.satisfaction)} (${share(one.low)} to ${share(one.high)})`);

// Numbers of versions for people: the registered ones are counted from 1.
let ordinals = {};
const called = (version) => ordinals[version] ?? `${version} (not registered)`;

function row(one, least) {
  return [
    one.version === 0 ? "base, the fallback" : called(one.version), one.arms.join(", ") || "–", one.conversations,
    share(one.ratingRate), `${one.thumbsUp} of ${one.rated}`, satisfied(one, least), one.answers, one.fallbacks, one.blocked, one.asked,
  ];
}

const counted = (one, least) => [one.by, one.name, one.conversations, one.rated, one.thumbsUp, satisfied(one, least)];

function state(found) {
  if (found.unreachable) return element("p", { class: "bad" }, found.unreachable);
  const falls = found.versions.reduce((sum, one) => sum + one.fallbacks, 0);
  const all = found.versions.reduce((sum, one) => sum + one.answers, 0);
  return element("p", { id: "state" },
    found.canary === null ? "No canary is on trial. " : `Version ${called(found.canary)} is on trial with ${share(found.canaryShare)} of the people. `,
    falls === 0 ? "No answer came from the fallback." : `${falls} of ${all} answers came from the fallback, the model as it was before anybody rated it.`,
    found.learns ? " What people rate is learned from." : " Nothing is learned from what people rate here.");
}

const STEPS = {
  waiting: "waits for ratings", ratings: "leaves out what cannot be believed", reward: "trains the reward model",
  training: "trains the next version", trial: "tries the new version as a canary",
};

// Until when the loop waits, and for what; a step that failed too often waits for somebody to decide.
function paused({ failure, paused: { by, reason, until_s } }) {
  if (until_s !== null) return `It is tried again at ${when(until_s * 1000)}.`;
  return failure && by === "loop" ? "It is not tried again by itself: try again, or abandon the round." : `Paused by ${by}: ${reason}`;
}

// Where the loop stands; nothing where there is none.
function loop(found) {
  const one = found.loop;
  if (one === null) return [];
  const until = `${one.newRatings} new ratings; the next round begins with ${one.labelsWanted} that count.`;
  return [
    element("h2", {}, "What is learned"),
    element("p", { id: "loop" }, `Round ${one.round}: the loop ${STEPS[one.step]}. ${until}`, one.note ? ` It waits: ${one.note}.` : ""),
    one.failure ? element("p", { id: "failure", class: "bad" }, `This step has failed ${one.tries === 1 ? "once" : `${one.tries} times`}: ${one.failure}`) : "",
    one.paused === null ? "" : element("p", { id: "paused", class: "bad" }, paused(one)),
    one.abandoned === null ? "" : element("p", { id: "abandoned" }, `${one.abandoned.by} has given this round up: ${one.abandoned.reason}`),
    table("Rounds that are over", ["round", "ended", "labels", "told apart", "version", "came to", "why"],
      one.past.map((past) => [past.number, when(past.ended_s * 1000), past.labels, past.auc?.toFixed(2), past.version === null ? null : called(past.version), past.outcome, past.why])),
    ...criteria(one),
  ];
}

function canaries({ canaries: { tried, falseAlarm, trial } }) {
  const so = `Canaries so far: ${tried}. ${falseAlarm === null ? "" : `Each that equals the active version is taken for better or worse with a chance of at most ${share(falseAlarm)}.`}`;
  if (trial === null) return element("p", { id: "canaries" }, so);
  return element("p", { id: "canaries" },
    `${so} Version ${called(trial.version)}: ${trial.canaryPeople} people have it and ${trial.activePeople} the active version; of the evidence for a `
    + `verdict there is ${share(trial.better)} that it is better and ${share(trial.worse)} that it is worse.`
    + (trial.ratesDiffer ? " People rate the two at different rates, so it is not called better: decide yourself." : ""));
}

// Buttons for what may be decided now; each asks why.
function decisions(found, again) {
  const why = field("Why, for the audit", "why", { required: true, maxlength: 500, autocomplete: "off", id: "why" });
  const input = why.querySelector("input");
  // body: what is sent, or a function that returns it, null where nothing is to be sent.
  const decide = (text, path, body) => button(text, async () => {
    const said = typeof body === "function" ? body() : body;
    if (said === null || !input.reportValidity()) return;
    await call("POST", path, { ...said, reason: input.value });
    await again();
  });
  const made = [];
  if (found.canary !== null) {
    made.push(decide(`Promote version ${called(found.canary)}`, "/api/chat/promote", { version: found.canary }));
    made.push(decide(`Withdraw version ${called(found.canary)}`, "/api/chat/rollback", { version: found.canary }));
  }
  if (found.active !== null) made.push(decide(`Roll back version ${called(found.active)}`, "/api/chat/rollback", { version: found.active }));
  if (found.loop && !found.loop.paused) made.push(decide("Pause the loop", "/api/chat/pause", {}));
  if (found.loop && found.loop.step !== "waiting") made.push(decide(`Abandon round ${found.loop.round}`, "/api/chat/abandon", {}));
  if (found.loop?.paused) made.push(button(found.loop.failure ? "Try again" : "Let the loop go on", async () => { await call("POST", "/api/chat/resume", {}); await again(); }));
  const weights = found.loop ? weighed(found.loop.weights, decide) : [];
  const all = [element("div", { class: "row", role: "group", "aria-label": "Decide" }, made), ...weights];
  return made.length || weights.length ? [element("h2", {}, "Decide"), why, ...all] : [];
}

function weighed(weights, decide) {
  const { fields, changed } = weighing(weights);
  const body = () => {
    const some = changed();
    return some === null ? null : { weights: some };
  };
  return [fields, element("div", { class: "row" }, decide("Weigh so from the next round on", "/api/chat/weigh", body))];
}

// What the canary and the active version are liked by, over the same time.
function trial({ trial: found, leastConversations: least }) {
  if (!found) return "";
  return table(`Satisfaction with both since the trial began, ${when(found.since)}`,
    ["version", "conversations", "rated", "thumbs up", "satisfaction"],
    found.versions.map((one) => [called(one.version), one.conversations, share(one.ratingRate), `${one.thumbsUp} of ${one.rated}`, satisfied(one, least)]));
}

const ACTIONS = { rolled_back: "rolled back", traffic: "traffic changed" };
const acted = (one) => (one.action === "promoted" && one.to === "canary" ? "put on trial" : ACTIONS[one.action] ?? one.action);

const decided = (one) => (one.weights === null ? acted(one)
  : `${one.action} ${Object.entries(one.weights).map(([name, weight]) => `${name} ${weight}`).join(", ")}`);

export async function look(place) {
  const [found, over] = await Promise.all([call("GET", "/api/chat/overview"), call("GET", "/api/chat/satisfaction")]);
  const blocks = Object.entries(found.blocked);
  ordinals = found.ordinals;
  place.replaceChildren(
    element("h2", {}, "How people like it"), state(found), trial(found),
    table("Satisfaction: thumbs-up among all conversations, rated or not, over each version's whole life, with the interval of 95 %",
      ["version", "arms", "conversations", "rated", "thumbs up", "satisfaction", "answers", "by fallback", "blocked", "asked about"],
      found.versions.map((one) => row(one, found.leastConversations))),
    table("Satisfaction by day (UTC) and by person who has rated",
      ["by", "day or person", "conversations", "rated", "thumbs up", "satisfaction"],
      over.rows.map((one) => counted(one, over.leastConversations))),
    table("What was blocked", ["by", "times"], blocks),
    table("Decisions", ["when", "what", "version", "by", "why"],
      found.decisions.map((one) => [when(one.time), decided(one), one.version === null ? null : called(one.version), one.by, one.reason])),
    ...loop(found), canaries(found), ...decisions(found, () => look(place)),
    button("Look again", () => look(place)));
}
