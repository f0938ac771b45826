// The form that starts a training, made from the JSON schema of the settings. Empty fields keep their defaults.

import { call } from "/api.js";
import { element } from "/dom.js";

let schema = null;

// begun: called with the name of the run that was started.
export async function showStart(place, begun) {
  if (place.childElementCount) return;
  schema ??= await (await fetch("/api/settings")).json();
  const told = element("p", { id: "start-told", role: "alert" });
  const form = element("form", { "aria-labelledby": "start-title" },
    field("name", { type: "string", description: "Of its folder.", pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]*" }, "", true),
    ...Object.entries(schema.properties).filter(([key]) => !schema.properties[key].properties && key !== "algorithm" && key !== "run")
      .map(([key, one]) => field(key, one, "settings.")),
    ...Object.entries(schema.properties).filter(([key, one]) => one.properties || key === "algorithm")
      .map(([key, one]) => (key === "algorithm" ? algorithm() : section(key, one))),
    element("button", { class: "main" }, "Start"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    told.textContent = "Starting …";
    try {
      const { name } = await call("POST", "/api/runs", { name: form.elements.name.value, settings: settingsOf(form) });
      told.textContent = "";
      begun(name);
    } catch (error) {
      told.textContent = error.message;
      const wrong = error.field && form.elements[error.field];
      if (wrong) reveal(wrong);
    }
  });
  place.replaceChildren(element("h2", { id: "start-title" }, "Start a training"), form, told);
}

function section(key, one) {
  return folded(key, one.description, fields(one.properties, `settings.${key}.`));
}

// The settings of an algorithm are those of its own section.
function algorithm() {
  const own = element("div", {});
  const fill = (name) => {
    const { name: _, ...others } = schema.algorithms[name].properties;
    own.replaceChildren(...fields(others, "settings.algorithm."));
  };
  const names = Object.keys(schema.algorithms);
  const chosen = element("select", { name: "settings.algorithm.name" }, ...names.map((name) => element("option", { value: name }, name)));
  const preset = schema.properties.algorithm.default?.name ?? names[0];
  chosen.value = preset;
  chosen.addEventListener("change", () => fill(chosen.value));
  fill(preset);
  return folded("algorithm", "How the learner learns.", [element("label", {}, "name", chosen), own]);
}

function fields(properties, prefix) {
  const all = Object.entries(properties);
  const shown = all.filter(([, one]) => !one.advanced).map(([key, one]) => field(key, one, prefix));
  const others = all.filter(([, one]) => one.advanced).map(([key, one]) => field(key, one, prefix));
  return others.length ? [...shown, folded("advanced", "", others)] : shown;
}

function folded(title, about, children) {
  return element("details", {}, element("summary", {}, title), about ? element("p", { class: "muted" }, about) : null, ...children);
}

function field(key, one, prefix, isNeeded = false) {
  const { type, allowed, bounds } = kindOf(one);
  const preset = one.default === undefined || one.default === null ? "" : typeof one.default === "object" ? JSON.stringify(one.default) : String(one.default);
  const common = { name: `${prefix}${key}`, "data-type": type, required: isNeeded };
  const input = allowed
    ? element("select", common, element("option", { value: "" }, preset ? `default: ${preset}` : "default"),
      ...allowed.map((value) => element("option", { value: JSON.stringify(value) }, String(value))))
    : element("input", { ...common, ...bounds, placeholder: preset, pattern: one.pattern, autocomplete: "off" });
  return element("label", {}, key, input, one.description ? element("small", {}, one.description) : null);
}

// The kind of an optional setting is the one that it has when it is set.
function kindOf(one) {
  const parts = (one.anyOf ?? [one]).filter((part) => part.type !== "null");
  const part = parts.length === 1 ? parts[0] : {};
  if (part.enum) return { type: "json", allowed: part.enum };
  if (part.type === "boolean") return { type: "json", allowed: [true, false] };
  if (part.type === "integer" || part.type === "number") {
    return { type: "number", bounds: { type: "number", min: part.minimum, max: part.maximum, step: part.type === "integer" ? 1 : "any" } };
  }
  return { type: part.type === "string" ? "string" : "json", bounds: { type: "text" } };
}

// Only the filled fields, nested as in TOML.
function settingsOf(form) {
  const found = {};
  for (const input of form.elements) {
    if (!input.name?.startsWith("settings.") || input.value === "") continue;
    const keys = input.name.split(".").slice(1);
    let inner = found;
    for (const key of keys.slice(0, -1)) inner = inner[key] ??= {};
    inner[keys.at(-1)] = valueOf(input);
  }
  return found;
}

function valueOf(input) {
  if (input.dataset.type === "number") return Number(input.value);
  if (input.dataset.type !== "json") return input.value;
  try {
    return JSON.parse(input.value);
  } catch {
    throw Object.assign(new Error(`${input.name.replace("settings.", "")}: write JSON, such as [64, 64] or {"key": 1}`), { field: input.name });
  }
}

function reveal(input) {
  for (let one = input.closest("details"); one; one = one.parentElement.closest("details")) one.open = true;
  input.focus();
}
