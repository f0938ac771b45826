// The page of goals: trainings, and injectors that live by what these have learned. What is shown is what the
// address says behind its `#`: PROJECT, PROJECT/jobs/JOB, or PROJECT/injectors/INJECTOR.

import { call, isSignedIn, signIn, signOut } from "/console/api.js";
import { button, element, field, form, guarded } from "/console/elements.js";
import { job, jobs } from "/console/jobs.js";
import { injector, injectors } from "/rl/injectors.js";

const main = document.getElementById("main");
let leaving = new AbortController();

async function show() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  if (!isSignedIn()) return showSignIn();
  const me = await call("GET", "/api/me");
  const [project, place, id] = decodeURIComponent(location.hash.slice(2)).split("/");
  const member = me.projects.find((one) => one.project === project) ?? me.projects[0];
  if (member === undefined) return fill(element("h2", {}, "You belong to no project"));
  showWho(me, member);
  const context = {
    base: `/api/projects/${member.project}`, project: member.project, role: member.role, signal, again: show,
  };
  const parts = await (place === "jobs" && id ? job(context, id)
    : place === "injectors" && id ? injector(context, id)
      : overview(context));
  if (!signal.aborted) fill(...parts);
}

async function overview(context) {
  return [...(await injectors(context)), ...(await jobs({ ...context, workload: "goals" }))];
}

function showSignIn() {
  for (const one of ["places", "who"]) document.getElementById(one).hidden = true;
  fill(element("h2", {}, "Sign in"),
    form("Sign in", async ({ name, password }) => { await signIn(name, password); await show(); },
      field("Name", "name", { autocomplete: "username", required: true }),
      field("Password", "password", { type: "password", autocomplete: "current-password", required: true })));
}

function showWho(me, member) {
  const nav = document.getElementById("places");
  nav.replaceChildren(
    element("a", { href: `#/${member.project}` }, "Overview"), element("a", { href: "/" }, "Console"));
  nav.hidden = false;
  const who = document.getElementById("who");
  const others = me.projects.filter((one) => one.project !== member.project)
    .flatMap((one) => [element("a", { href: `#/${one.project}` }, one.project), " "]);
  who.replaceChildren(`${me.name}, ${member.role} of ${member.project} `, ...others,
    button("Sign out", async () => { await signOut(); location.hash = ""; await show(); }));
  who.hidden = false;
}

function fill(...children) {
  main.replaceChildren(...children);
  main.focus();
}

addEventListener("hashchange", () => guarded(show));
guarded(show);
