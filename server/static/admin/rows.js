/** Lists whose rows are kept from refresh to refresh, so that focus and playing sounds survive. */

import { make } from "../shared/dom.js";
import { setText, t } from "../shared/i18n.js";

/** Rows of one list. */
export class Rows {
  #list;
  #empty;
  #make;
  #update;
  #rows = new Map(); // key -> {element, parts, item}

  /**
   * @param {HTMLElement} list
   * @param {(item: object) => object} makeRow returns the row's elements by name; `children` is what the row contains
   * @param {(parts: object, item: object) => void} updateRow
   * @param {HTMLElement|null} empty shown while there are no rows
   */
  constructor(list, makeRow, updateRow, empty = null) {
    this.#list = list;
    this.#make = makeRow;
    this.#update = updateRow;
    this.#empty = empty;
  }

  /** @param {object[]} items @param {(item: object) => string} keyOf */
  show(items, keyOf) {
    const keys = new Set(items.map(keyOf));
    for (const [key, row] of this.#rows) if (!keys.has(key)) this.#remove(key, row);
    items.forEach((item, at) => {
      const key = keyOf(item);
      const row = this.#rows.get(key) ?? this.#add(key, item);
      row.item = item;
      this.#update(row.parts, item);
      if (this.#list.children[at] !== row.element) this.#list.insertBefore(row.element, this.#list.children[at] ?? null);
    });
    if (this.#empty) this.#empty.hidden = items.length > 0;
  }

  /** Draw the rows again, after a change of language. */
  redraw() {
    for (const { parts, item } of this.#rows.values()) this.#update(parts, item);
  }

  #add(key, item) {
    const parts = this.#make(item);
    const row = { element: make("li", {}, ...parts.children), parts, item };
    this.#rows.set(key, row);
    return row;
  }

  #remove(key, { element }) {
    const hadFocus = element.contains(document.activeElement);
    element.remove();
    this.#rows.delete(key);
    if (hadFocus) this.#list.closest("section").querySelector("h2").focus();
  }
}

/** Title and line of details of a row. */
export function twoLines() {
  const title = make("strong");
  const details = make("span");
  return { title, details, what: make("div", { class: "what" }, title, details) };
}

/** A button of a row. Set its name with `nameButton`. */
export function rowButton(key, act, danger = false) {
  const button = make("button", { class: danger ? "button danger" : "button", type: "button" });
  setText(button, key);
  button.onclick = act;
  return button;
}

/** Give a button a name that says what it acts on. */
export function nameButton(button, name) {
  button.setAttribute("aria-label", `${t(button.dataset.text)}: ${name}`);
}
