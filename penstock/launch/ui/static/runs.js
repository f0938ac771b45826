// The list of runs: links to one, ticks to compare. Rows stay the same elements, so that focus is not lost.

import { byId, compact, decimal, element, isKnown, say } from "/dom.js";

const rows = new Map();

// chosen: name of the run shown. compared: names ticked. toggle: called with a name.
export function listRuns(runs, { chosen, compared, address, toggle }) {
  const list = byId("runs");
  const names = new Set(runs.map((run) => run.name));
  for (const [name, row] of rows) {
    if (!names.has(name)) {
      row.item.remove();
      rows.delete(name);
    }
  }
  runs.forEach((run, index) => {
    const row = rows.get(run.name) ?? makeRow(run.name, toggle);
    if (list.children[index] !== row.item) list.insertBefore(row.item, list.children[index] ?? null);
    fillRow(row, run, run.name === chosen, compared.includes(run.name), address(run.name));
  });
}

function makeRow(name, toggle) {
  const tick = element("input", { type: "checkbox", "aria-label": `Compare ${name}` });
  tick.addEventListener("change", () => toggle(name));
  const value = element("span", { class: "value" });
  const about = element("small");
  const link = element("a", {}, element("span", { class: "name", title: name }, name), value, about);
  const row = { item: element("li", {}, tick, link), tick, link, value, about };
  rows.set(name, row);
  return row;
}

function fillRow(row, run, isChosen, isCompared, address) {
  row.item.classList.toggle("chosen", isChosen);
  row.tick.checked = isCompared;
  row.link.setAttribute("href", address);
  if (isChosen) row.link.setAttribute("aria-current", "page");
  else row.link.removeAttribute("aria-current");
  say(row.value, isKnown(run.mean_return) ? decimal(run.mean_return) : "");
  const steps = isKnown(run.env_steps) ? `${compact(run.env_steps)} steps` : "no steps yet";
  say(row.about, `${run.state} · ${run.environment} · ${steps}`);
}
