/** The color scheme: the system's, or the user's choice, which is stored. */

const KEY = "duologue_theme";
const CHOICES = ["auto", "light", "dark"];
const listeners = new Set();

export const theme = () => {
  const stored = localStorage.getItem(KEY);
  return CHOICES.includes(stored) ? stored : "auto";
};

/** Apply the stored choice. Call it first, so that the page does not change its colors while it loads. */
export function applyTheme() {
  const chosen = theme();
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  for (const listener of listeners) listener();
}

/** Switch to the next choice: auto, light, dark. @returns {string} it */
export function nextTheme() {
  const chosen = CHOICES[(CHOICES.indexOf(theme()) + 1) % CHOICES.length];
  localStorage.setItem(KEY, chosen);
  applyTheme();
  return chosen;
}

/** Call `listener` after each change, also of the system's scheme. */
export function onTheme(listener) {
  listeners.add(listener);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", listener);
}

/** The computed value of a color variable at an element, for a canvas. */
export function colorOf(element, name) {
  const before = element.style.color;
  element.style.color = `var(${name})`;
  const color = getComputedStyle(element).color;
  element.style.color = before;
  return color;
}
