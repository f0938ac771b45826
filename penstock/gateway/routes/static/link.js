// Responses that a person rates by a link, without an account. The secret of the link is behind the `#` of the
// address, which browsers send to no server; calls send it in a header.

import { Refused } from "./api.js";
import { button, element, field, form, guarded, when } from "./elements.js";

const REPEATED = "conflict";
const NUMBERS = ["first", "second"];
const main = document.getElementById("main");

async function call(method, path, body) {
  const reply = await fetch(path, {
    method,
    headers: { "Penstock-Link": location.hash.slice(1), "Content-Type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const content = await reply.json();
  if (!reply.ok) throw new Refused(reply.status, content);
  return content;
}

async function show() {
  main.replaceChildren();
  const { items, expires } = await call("GET", "/api/link");
  main.replaceChildren(
    element("p", {}, `Each counts once, until ${when(expires)}.`),
    ...items.map((item, number) => shown(item, number, items.length)));
  main.focus();
}

function shown(item, number, count) {
  const told = element("p", { role: "status", "aria-label": `What became of ${number + 1}` }, "");
  const rate = async (said) => {
    try {
      await call("POST", "/api/link/ratings", { item: number, ...said });
      told.textContent = "Thank you.";
    } catch (error) {
      if (error.word !== REPEATED) throw error;
      told.textContent = "You have rated this before: what you said first counts.";
    }
    asked.hidden = true;
  };
  const asked = element("div", {}, item.responses ? choice(item, number, rate) : score(item, number, rate));
  return element("section", { "aria-label": `${number + 1} of ${count}` },
    element("h2", {}, `${number + 1} of ${count}`), element("h3", {}, "Asked"), text(item.prompt), asked, told);
}

function score(item, number, rate) {
  return [element("h3", {}, "Answer"), text(item.response),
    form("Rate", ({ score: said, notes }) => rate({ score: Number(said), notes }),
      field(`Score of ${number + 1}, 0 to 1`, "score", { type: "number", min: 0, max: 1, step: "any", required: true }),
      field(`Why, of ${number + 1}`, "notes", { maxlength: 2000 }))];
}

function choice(item, number, rate) {
  return item.responses.flatMap((response, place) => [
    element("h3", {}, `The ${NUMBERS[place]} answer`), text(response),
    button(`The ${NUMBERS[place]} is better (${number + 1})`, () => rate({ chosen: place }))]);
}

const text = (said) => element("p", { class: "said" }, said);

addEventListener("hashchange", () => guarded(show));
guarded(show);
