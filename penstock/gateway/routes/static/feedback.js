// Feedback on responses of agents: shows it with filters, and gives feedback.

import { call, lines } from "./api.js";
import { element, field, form, table, when } from "./elements.js";

const MOST_READ = 20000;
const MOST_SHOWN = 200;
const ENOUGH = 10;

export async function feedback({ base, role }) {
  const shown = element("div", {});
  const score = { type: "number", min: 0, max: 1, step: "any" };
  const act = async ({ agent, ...wanted }) => {
    const path = `${base}/agents/${encodeURIComponent(agent)}`;
    const every = await read(`${path}/feedback`);
    const found = every.filter((one) => fits(one, wanted));
    const rows = found.reverse().slice(0, MOST_SHOWN).map((one) => [
      when(one.createdAt), one.key, one.version ?? "–", JSON.stringify(one.prompt), one.response ?? one.chosen,
      isPair(one) ? `better than: ${one.rejected}` : String(one.score), one.notes]);
    const { leastConversations, versions } = await call("GET", `${path}/satisfaction`);
    shown.replaceChildren(element("p", {}, told(found, every)), satisfied(leastConversations, versions),
      table("Newest ratings", ["When", "Aspect", "Version", "Prompt", "Response", "Score", "Notes"], rows),
      ...late(await read(`${path}/late-rewards`)));
  };
  const parts = [element("h2", {}, "Feedback"),
    form("Show", act, field("Agent", "agent", { required: true, maxlength: 39 }),
      element("details", {}, element("summary", {}, "Only some"),
        field("Only of aspect", "key", { maxlength: 64 }),
        field("Only of version", "version", { type: "number", min: 1, step: 1 }),
        field("Score at least", "least", score), field("Score at most", "most", score),
        field("With the words", "words", { maxlength: 200 }))), shown];
  if (role !== "viewer") parts.push(...rating(base), ...comparison(base));
  return parts;
}

const isPair = (one) => one.rejected !== undefined;

// All rows of a path, oldest first; at most the first MOST_READ.
async function read(place) {
  const found = [];
  while (found.length < MOST_READ) {
    const page = await lines(`${place}?after=${found.at(-1)?.number ?? 0}`);
    if (!page.length) break;
    found.push(...page);
  }
  return found;
}

function fits(one, { key, version, least, most, words }) {
  const said = [JSON.stringify(one.prompt), one.response, one.chosen, one.rejected, one.notes];
  const text = said.join("\n").toLowerCase();
  return (!key || one.key === key) && (!version || one.version === Number(version))
    && (least === "" || one.score >= Number(least)) && (most === "" || one.score <= Number(most))
    && text.includes(words.toLowerCase());
}

function told(found, every) {
  const scores = found.filter((one) => !isPair(one)).map((one) => one.score);
  const pairs = found.length - scores.length;
  const mean = scores.reduce((sum, one) => sum + one, 0) / scores.length;
  const of = found.length === every.length ? "" : ` of ${every.length}`;
  const compared = pairs === 0 ? "" : `; ${pairs} ${pairs === 1 ? "comparison" : "comparisons"} of two answers`;
  const rest = compared + (every.length < MOST_READ ? "" : `; only the oldest ${every.length} were looked at`);
  return scores.length < ENOUGH ? `${scores.length}${of} ratings: too few to tell how good the agent is${rest}`
    : `${scores.length}${of} ratings, ${mean.toFixed(2)} on average${rest}`;
}

// Thumbs-up over all conversations of a version, as people who rate have stronger opinions than others.
function satisfied(least, versions) {
  const share = (value) => `${(100 * value).toFixed(0)} %`;
  const rows = versions.map((one) => [
    String(one.version),
    one.satisfaction === null ? `cannot tell, below ${least} conversations`
      : `${share(one.satisfaction)} (${share(one.low)} to ${share(one.high)})`,
    one.ratingRate === null ? "–" : share(one.ratingRate), String(one.conversations), String(one.rated),
  ]);
  return table("Satisfaction with versions", ["Version", "Thumbs-up of all conversations", "Rated", "Conversations", "Ratings"], rows);
}

// Late rewards, if there are any.
function late(found) {
  if (!found.length) return [];
  const sum = found.reduce((total, one) => total + one.amount, 0);
  const rows = found.slice(-MOST_SHOWN).reverse().map((one) => [
    when(one.createdAt), one.episode, String(one.step), String(one.amount)]);
  const told = found.length === 1 ? "1 late reward" : `${found.length} late rewards`;
  return [element("p", {}, `${told}, ${sum.toPrecision(4)} together: no training uses them`),
    table("Newest late rewards", ["When", "Episode", "Step", "Amount"], rows)];
}

function comparison(base) {
  const told = element("p", { role: "status", "aria-label": "Compared" });
  let count = 0;
  const act = async ({ agent, ...body }) => {
    await call("POST", `${base}/agents/${encodeURIComponent(agent)}/pairs`, body);
    count += 1;
    told.textContent = `${count} stored`;
  };
  return [element("h3", {}, "Compare two answers"),
    form("Prefer", act, field("Who answered", "agent", { required: true, maxlength: 39 }),
      field("What was asked", "prompt", { required: true }), field("The better answer", "chosen", { required: true }),
      field("The other answer", "rejected", { required: true }), field("Why", "notes")), told];
}

function rating(base) {
  const told = element("p", { role: "status", "aria-label": "Rated" });
  let count = 0;
  const act = async ({ agent, prompt, response, score, notes }) => {
    const body = { prompt, response, score: Number(score), notes };
    await call("POST", `/api/policies/feedback/${encodeURIComponent(agent)}`, body, base.split("/").at(-1));
    count += 1;
    told.textContent = `${count} stored`;
  };
  return [element("h3", {}, "Rate an answer"),
    form("Rate", act, field("Of agent", "agent", { required: true, maxlength: 39 }),
      field("Prompt", "prompt", { required: true }), field("Response", "response", { required: true }),
      field("Score, 0 to 1", "score", { type: "number", min: 0, max: 1, step: 0.1, required: true }),
      field("Notes", "notes")), told];
}
