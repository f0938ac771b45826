// Builds parts of the page. Text is set as text: nothing from the network becomes markup.

// attributes: a key that begins with `on` is a listener.
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.flat().map((child) => (child instanceof Node ? child : String(child ?? "–"))));
  return made;
}

// An element of SVG.
export function shape(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export function field(label, name, attributes = {}) {
  return element("label", {}, label, element("input", { name, ...attributes }));
}

export function choice(label, name, options) {
  return element("label", {}, label,
    element("select", { name }, options.map((one) => element("option", { value: one }, one))));
}

// A form that passes its values to `act`, and shows errors.
export function form(button, act, ...children) {
  return element("form", {
    onsubmit: (event) => {
      event.preventDefault();
      guarded(() => act(Object.fromEntries(new FormData(event.target))));
    },
  }, ...children, element("button", { class: "main" }, button));
}

export function button(text, act) {
  return element("button", { type: "button", onclick: () => guarded(act) }, text);
}

export function table(caption, headings, rows) {
  return element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption },
    element("table", {},
      element("caption", {}, rows.length ? caption : `${caption}: none`),
      element("thead", {}, element("tr", {}, headings.map((one) => element("th", { scope: "col" }, one)))),
      element("tbody", {}, rows.map((row) =>
        element("tr", {}, row.map((cell) => element("td", {}, cell)))))));
}

export const when = (text) => (text ? new Date(text).toLocaleString() : "–");

export async function guarded(act) {
  const notice = document.getElementById("notice");
  notice.textContent = "";
  try {
    await act();
  } catch (error) {
    if (error.name !== "AbortError") notice.textContent = error.message;
  }
}
