// Elements and numbers. Text from a run is only ever set as text.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  setAll(made, attributes);
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

function setAll(target, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) target.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) target.setAttribute(name, value);
  }
}

export const byId = (id) => document.getElementById(id);

// Sets text only if it differs, so that nothing flickers and a screen reader reads only changes.
export function say(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

const counts = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const isKnown = (value) => value !== null && value !== undefined;
export const count = (value) => (isKnown(value) ? counts.format(value) : "–");
export const compact = (value) => (Math.abs(value) < 10000 ? decimal(value) : short.format(value));
export const decimal = (value, places = 1) =>
  isKnown(value) ? Number(value.toFixed(places)).toLocaleString("en") : "–";
export const rate = (value) => (isKnown(value) ? (value < 10 ? decimal(value) : count(value)) : "–");
export const milliseconds = (value) => (isKnown(value) ? `${decimal(value * 1000)} ms` : "");

export function bytes(value) {
  if (!isKnown(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (value >= 1000 && power < units.length - 1) [value, power] = [value / 1000, power + 1];
  return `${decimal(value)} ${units[power]}`;
}

export function duration(seconds) {
  if (!isKnown(seconds)) return "–";
  if (seconds < 60) return `${decimal(seconds)} s`;
  const whole = Math.round(seconds);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  const two = (part) => String(part).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)} h` : `${minutes}:${two(whole % 60)} min`;
}

export const moment = (unixSeconds) =>
  new Date(unixSeconds * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });

// rows: arrays of cells; a cell is text or { text, kind }.
export function fillTable(table, headings, rows, nothing) {
  const head = element("tr", {}, ...headings.map((one) => cell("th", one, { scope: "col" })));
  const body = rows.map((row) => element("tr", {}, ...row.map((one) => cell("td", one))));
  const none = element("tr", {}, element("td", { class: "none", colspan: headings.length }, nothing));
  table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...(body.length ? body : [none])));
}

function cell(tag, content, attributes = {}) {
  const { text, kind } = typeof content === "object" ? content : { text: content, kind: null }; // text may be an element
  return element(tag, { ...attributes, class: kind }, text);
}
