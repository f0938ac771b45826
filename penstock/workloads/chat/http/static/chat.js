// A page to talk to the versions of a run and to rate what they say.

import { call, follow, forgetMe, me, talkTo } from "./calls.js";
import { opened, tell } from "./door.js";
import { button, element, form, guarded } from "./elements.js";
import { look } from "./overview.js";
import { preference, ratings } from "./ratings.js";

const parts = Object.fromEntries(["agents", "talk", "look", "mine"].map((id) => [id, document.getElementById(id)]));
const log = element("div", { id: "log", role: "log", "aria-label": "What was said" });
const text = element("textarea", { name: "text", required: true, maxlength: "4000" });
const stop = button("Stop", async () => growing?.abort());
const again = button("Answer once more", () => opened(() => answer(null)));
const waits = element("p", { id: "waits", role: "status" }, "");
const LOOK_MS = 2000;
let conversation = null;
let growing = null;

const who = (one) => (one.fallback ? "base model (fallback)" : `version ${one.ordinal ?? one.version}${one.arm ? `, ${one.arm}` : ""}`);

const ASKS = "Please say whether you like this answer: it is not clear what people think of such a one.";

function bubble(mine, name) {
  const said = element("p", {}, "");
  const around = element("div", { class: mine ? "said mine" : "said" }, element("div", { class: "who" }, name), said);
  log.append(around);
  return { around, said };
}

// What could not be answered goes back to where it was typed, before what has been typed since.
function putBack(words) {
  if (words !== null) text.value = [words, text.value].filter(Boolean).join("\n");
}

async function answer(words) {
  if (words !== null && text.value.trim() === words) text.value = "";
  try {
    await answered(words);
  } catch (error) {
    putBack(words);
    if (error.status === 503) later();
    throw error;
  }
}

async function answered(words) {
  if (conversation === null) conversation = (await call("POST", "/api/chat/begin", { me: me() })).conversation;
  const asked = words === null ? null : bubble(true, "you");
  if (asked) asked.said.textContent = words;
  const { around, said } = bubble(false, "…");
  const name = around.querySelector(".who");
  growing = new AbortController();
  stop.disabled = false;
  again.disabled = true;
  around.setAttribute("aria-busy", "true");
  around.scrollIntoView({ block: "nearest" });
  let ended = false;
  try {
    const asking = { me: me(), conversation, ...(words === null ? {} : { text: words }) };
    for await (const { event, data } of follow("/api/chat/say", asking, growing.signal)) {
      if (event === "part") said.textContent += data.text;
      else ended = true;
      if (event === "refused") {
        refused(asked, around, data.detail);
        putBack(words);
      }
      if (event === "answer") whole(around, said, name, data);
    }
    if (!ended) throw new Error("The answer broke off: send it again.");
  } catch (error) {
    if (error.name !== "AbortError") {
      asked?.around.remove();
      around.remove();
      if (error.status === 404) conversation = null;
      throw error;
    }
    name.textContent = "stopped: not part of the conversation";
  } finally {
    around.removeAttribute("aria-busy");
    growing = null;
    stop.disabled = true;
    around.scrollIntoView({ block: "nearest" });
  }
}

function refused(asked, around, detail) {
  around.querySelector(".who").textContent = "not answered";
  around.querySelector("p").textContent = detail;
  around.querySelector("p").classList.add("bad");
  asked?.around.querySelector(".who").append(" (not part of the conversation)");
}

function whole(around, said, name, data) {
  said.textContent = data.text;
  name.textContent = data.blocked ? `${who(data)}: the rest was blocked by the guard` : who(data);
  again.disabled = false;
  const told = element("p", { role: "status", class: "who" }, data.asked ? ASKS : "");
  if (data.asked) around.classList.add("asked");
  if (!data.again) {
    const shares = Object.entries(data.expected ?? {}).map(([side, share]) => `${side} ${(100 * share).toFixed(0)} %`);
    const expected = shares.length ? ` Expected of people: ${shares.join(", ")}.` : "";
    around.append(ratings(conversation, data.turn, told, expected), told);
    return;
  }
  around.append(preference(conversation, data.turn, (chosen) => {
    around.querySelector("[role=group]").remove();
    told.textContent = `Kept. The conversation goes on with: ${chosen}`;
    again.focus();
  }), told);
}

async function end() {
  growing?.abort();
  if (conversation !== null) await call("POST", "/api/chat/end", { me: me(), conversation });
  conversation = null;
  again.disabled = true;
  log.replaceChildren();
  text.focus();
}

function begin() {
  stop.disabled = again.disabled = true;
  const ask = form("Send", async ({ text: words }) => {
    if (growing !== null) throw new Error("An answer is still coming: wait for it, or stop it.");
    await opened(() => answer(words.trim()));
  }, element("label", {}, "Say something", text));
  ask.id = "ask";
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask.requestSubmit();
  });
  const rest = element("div", { class: "row" }, stop, again, button("New conversation", () => opened(end)));
  parts.talk.replaceChildren(log, element("div", { id: "dock" }, waits, ask, rest));
}

async function showMine() {
  const { ratings: kept } = await call("POST", "/api/chat/mine", { me: me() });
  const file = URL.createObjectURL(new Blob([JSON.stringify(kept, null, 1)], { type: "application/json" }));
  parts.mine.replaceChildren(
    element("h2", {}, "Your data"),
    element("p", { id: "kept" }, `${kept.length} ratings of yours are kept, with the messages that they are about. Conversations `
      + "without a rating are counted, and their texts are not kept."),
    element("div", { class: "row" },
      element("a", { href: file, download: "ratings.json" }, "Download them"),
      button("Delete them", async () => {
        await call("POST", "/api/chat/forget", { me: me() });
        forgetMe();
        conversation = null;
        await showMine();
      })));
}

// Lets people choose whom they talk to, where there are several.
async function chooseAgent() {
  const { agents } = await call("GET", "/api/chat/agents");
  if (agents.length < 2) return;
  const names = agents.map((one) => element("option", { value: one }, one || "the first"));
  const chosen = element("select", { id: "agent" }, names);
  chosen.addEventListener("change", () => guarded(async () => {
    await end();
    talkTo(chosen.value);
    await turn();
  }));
  parts.agents.replaceChildren(element("label", {}, "Talk to", chosen));
  parts.agents.hidden = false;
}

// Says why nothing answers yet, such as a model that is being made, until something does.
async function lookWhether() {
  const why = (await call("GET", "/api/chat/ready")).unreachable;
  waits.textContent = why && `No answers yet: ${why}`;
  if (why) later();
}

const later = () => setTimeout(() => lookWhether().catch(later), LOOK_MS);

// Shows the part of the page that the address names.
async function turn() {
  const name = ["look", "mine"].find((one) => location.hash === `#${one}`) ?? "talk";
  for (const one of ["talk", "look", "mine"]) parts[one].hidden = one !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (name === "look") await opened(() => look(parts.look));
  if (name === "mine") await opened(showMine);
}

async function start() {
  await tell();
  await chooseAgent();
  await turn();
  await lookWhether();
}

begin();
window.addEventListener("hashchange", () => guarded(turn));
guarded(() => opened(start));
