// For those who look after the chat: satisfaction by version, what answers, what was blocked, what was decided.

import { call } from "./calls.js";
import { button, element, table, when } from "./elements.js";

const share = (number) => (number === null ? "–" : `${(100 * number).toFixed(0)} %`);

function satisfied(one, least) {
  return one.satisfaction === null
    ? `cannot tell below ${least} conversations`
    : `${share(one.satisfaction)} (${share(one.low)} to ${share(one.high)})`;
}

function row(one, least) {
  return [
    one.version === 0 ? "base, the fallback" : one.version, one.arms.join(", ") || "–", one.conversations,
    share(one.ratingRate), `${one.thumbsUp} of ${one.rated}`, satisfied(one, least), one.answers, one.fallbacks, one.blocked,
  ];
}

function state(found) {
  if (found.unreachable) return element("p", { class: "bad" }, found.unreachable);
  const falls = found.versions.reduce((sum, one) => sum + one.fallbacks, 0);
  const all = found.versions.reduce((sum, one) => sum + one.answers, 0);
  return element("p", { id: "state" },
    found.canary === null ? "No canary is on trial. " : `Version ${found.canary} is on trial with ${share(found.canaryShare)} of the people. `,
    falls === 0 ? "No answer came from the fallback." : `${falls} of ${all} answers came from the fallback, the model as it was before anybody rated it.`,
    found.learns ? " What people rate is learned from." : " Nothing is learned from what people rate here.");
}

export async function look(place) {
  const found = await call("GET", "/api/chat/overview");
  const blocks = Object.entries(found.blocked);
  place.replaceChildren(
    element("h2", {}, "How people like it"), state(found),
    table("Satisfaction: thumbs-up among all conversations, rated or not, with the interval of 95 %",
      ["version", "arms", "conversations", "rated", "thumbs up", "satisfaction", "answers", "by fallback", "blocked"],
      found.versions.map((one) => row(one, found.leastConversations))),
    table("What was blocked", ["by", "times"], blocks),
    table("Decisions", ["when", "what", "version", "by", "why"],
      found.decisions.map((one) => [when(one.time), one.action, one.version, one.by, one.reason])),
    button("Look again", () => look(place)));
}
