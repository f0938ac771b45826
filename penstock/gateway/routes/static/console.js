// The console. The part of the address behind `#` selects the view: PROJECT/PLACE, or PROJECT/jobs/JOB.

import { arriveFromProvider, call, isSignedIn, leaveForProvider, provider, signIn, signOut, signUp } from "./api.js";
import { button, element, field, form, guarded } from "./elements.js";
import { feedback } from "./feedback.js";
import { job, jobs } from "./jobs.js";
import { audit, people } from "./people.js";

const PLACES = { jobs: "Jobs", feedback: "Feedback", people: "People", audit: "Audit" };
const main = document.getElementById("main");
let leaving = new AbortController();

async function show() {
  leaving.abort();
  leaving = new AbortController();
  if (location.hash === "#/arrived") {
    history.replaceState(null, "", "/");
    await arriveFromProvider();
  }
  if (!isSignedIn()) return showSignIn();
  const me = await call("GET", "/api/me");
  const [project, place = "jobs", id] = decodeURIComponent(location.hash.slice(2)).split("/");
  const member = me.projects.find((one) => one.project === project) ?? me.projects[0];
  if (member === undefined) return fill(element("h2", {}, "You belong to no project"));
  showPlaces(me, member, place);
  const base = `/api/projects/${member.project}`;
  const context = { base, project: member.project, role: member.role, signal: leaving.signal, again: show };
  const views = { jobs: id ? (one) => job(one, id) : jobs, feedback, people, audit };
  fill(...(await (views[place] ?? jobs)(context)));
}

const REFUSED = {
  "#/not-invited": "You have no account here. Ask the owner of a project for an invitation, and sign in with it.",
  "#/not-signed-in": "That did not sign you in. Try again.",
};

async function showSignIn() {
  document.getElementById("places").hidden = true;
  document.getElementById("who").hidden = true;
  fill(element("h2", {}, "Sign in"),
    form("Sign in", async ({ name, password }) => { await signIn(name, password); await show(); },
      field("Name", "name", { autocomplete: "username", required: true }),
      field("Password", "password", { type: "password", autocomplete: "current-password", required: true })),
    ...(await elsewhere()),
    element("h2", {}, "Sign up"),
    form("Sign up", async ({ name, password, invitation }) => { await signUp(name, password, invitation); await show(); },
      field("Invitation", "invitation", { autocomplete: "off", required: true }),
      field("New name", "name", { autocomplete: "username", required: true }),
      field("New password", "password", { type: "password", autocomplete: "new-password", required: true })));
}

// The button for the provider, if there is one, and the error of the last attempt.
async function elsewhere() {
  const title = await provider();
  if (title === null) return [];
  const told = REFUSED[location.hash];
  return [element("h2", {}, `Sign in with ${title}`),
    ...(told ? [element("p", { role: "alert" }, told)] : []),
    form(`Go to ${title}`, async ({ code }) => { await leaveForProvider(code); },
      field("Invitation, the first time", "code", { autocomplete: "off" }))];
}

function showPlaces(me, member, place) {
  const nav = document.getElementById("places");
  const named = Object.entries(PLACES).filter(([key]) => member.role === "owner" || key !== "audit");
  nav.replaceChildren(...named.map(([key, text]) => element("a", {
    href: `#/${member.project}/${key}`, "aria-current": key === place ? "page" : undefined,
  }, text)));
  nav.hidden = false;
  const who = document.getElementById("who");
  const others = me.projects.filter((one) => one.project !== member.project)
    .map((one) => [element("a", { href: `#/${one.project}/${place}` }, one.project), " "]);
  who.replaceChildren(`${me.name}, ${member.role} of ${member.project} `, ...others.flat(),
    button("Sign out", async () => { await signOut(); location.hash = ""; await show(); }));
  who.hidden = false;
}

function fill(...children) {
  main.replaceChildren(...children);
  main.focus();
}

addEventListener("hashchange", () => guarded(show));
guarded(show);
