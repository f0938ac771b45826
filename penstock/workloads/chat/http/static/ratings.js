// What somebody may say of an answer: a thumb, stars for three sides of it, which of two answers is better.

import { call, fresh, me } from "./calls.js";
import { button, element, form } from "./elements.js";

const SIDES = ["relevance", "helpfulness", "safety"];

const body = (conversation, turn) => ({ me: me(), conversation, turn, id: fresh() });

// expected: the thumb that the judge expects, shown once a thumb is kept, so that it sways no rater.
export function ratings(conversation, turn, said, expected) {
  const thumbs = [["I like this answer", true], ["I do not like this answer", false]].map(([label, up]) => {
    const made = button(label, async () => {
      const kept = await call("POST", "/api/chat/thumb", { ...body(conversation, turn), up });
      thumbs.forEach((one) => one.setAttribute("aria-pressed", String(one === made)));
      said.textContent = (kept.rewarded ? "Kept, and learned from." : "Kept.") + expected;
    });
    made.setAttribute("aria-pressed", "false");
    return made;
  });
  return element("div", {},
    element("div", { class: "row" }, thumbs),
    element("details", {}, element("summary", {}, "Say more"), SIDES.map((side) => stars(conversation, turn, side, said)),
      correction(conversation, turn, said)));
}

// What the answer should have been.
function correction(conversation, turn, said) {
  const text = element("textarea", { name: "text", required: true, maxlength: "4000" });
  return form("Keep it", async ({ text: words }) => {
    await call("POST", "/api/chat/correct", { ...body(conversation, turn), text: words });
    said.textContent = "Kept: what it should have said.";
  }, element("label", {}, "What it should have said", text));
}

function stars(conversation, turn, key, said) {
  const buttons = [1, 2, 3, 4, 5].map((number) => {
    const made = button(`${number}`, async () => {
      await call("POST", "/api/chat/stars", { ...body(conversation, turn), key, stars: number });
      buttons.forEach((one) => one.setAttribute("aria-pressed", String(one === made)));
      said.textContent = `Kept: ${key} ${number} of 5.`;
    });
    made.setAttribute("aria-label", `${key}: ${number} of 5`);
    made.setAttribute("aria-pressed", "false");
    return made;
  });
  return element("fieldset", {}, element("legend", {}, key), buttons);
}

// first, second: the texts. chosen: told of the text that the conversation goes on with.
export function preference(conversation, turn, chosen) {
  const choose = (better) => async () => {
    const kept = await call("POST", "/api/chat/prefer", { ...body(conversation, turn), better });
    chosen(kept.text);
  };
  return element("div", { class: "row", role: "group", "aria-label": "Which is better?" },
    button("The first is better", choose("first")), button("The second is better", choose("second")));
}
