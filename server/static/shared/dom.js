/** Short forms for elements. */

export const byId = (id) => document.getElementById(id);

/**
 * A new element.
 * @param {string} name of the tag @param {object} attributes by name; functions become properties, null is left out
 * @param {...(Node|string)} children
 */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") element[key] = value;
    else if (value === true) element.setAttribute(key, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

/** An icon of `icons.svg`. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", iconPath(name));
  svg.append(use);
  return svg;
}

export const iconPath = (name) => `/static/shared/icons.svg#${name}`;

/** Replace the icon inside an element. */
export const setIcon = (element, name) => element.querySelector("use").setAttribute("href", iconPath(name));

/** Whether keys typed at this element belong to it. */
export const takesKeys = (element) =>
  element.closest?.("button, a, input, select, textarea, summary, [contenteditable], [role=radio]") !== null;

/** Fill a select. @param {[string, string][]} options value and text; an unknown `value` selects the first one */
export function fillSelect(select, options, value) {
  select.replaceChildren(...options.map(([id, text]) => new Option(text, id)));
  select.value = options.some(([id]) => id === value) ? value : (options[0]?.[0] ?? "");
}
