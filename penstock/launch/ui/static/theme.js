// Light, dark, or the theme of the system; kept in the browser if it allows that.

const NAMES = ["system", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");

export function offerThemes(button) {
  let name = remembered();
  const apply = () => {
    document.documentElement.dataset.theme = name === "system" ? (system.matches ? "dark" : "light") : name;
    button.textContent = `Theme: ${name}`;
  };
  button.addEventListener("click", () => {
    name = NAMES[(NAMES.indexOf(name) + 1) % NAMES.length];
    remember(name);
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}

function remembered() {
  try {
    const name = localStorage.getItem("theme");
    return NAMES.includes(name) ? name : "system";
  } catch {
    return "system"; // storage is off: then it holds for this page
  }
}

function remember(name) {
  try {
    localStorage.setItem("theme", name);
  } catch {
    return; // storage is off
  }
}
