/** Arrow keys in a toolbar: one tab stop, the arrows move between the enabled and visible buttons. */

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

export class Toolbar {
  #root;

  /** @param {HTMLElement} root with role toolbar */
  constructor(root) {
    this.#root = root;
    root.addEventListener("keydown", (event) => this.#onKey(event));
    root.addEventListener("focusin", ({ target }) => this.#hold(target.closest("button")));
    this.refresh();
  }

  get #buttons() {
    return [...this.#root.querySelectorAll("button")].filter((one) => !one.hidden && !one.disabled);
  }

  get #current() {
    const buttons = this.#buttons;
    return buttons.find((one) => one.tabIndex === 0) ?? buttons[0];
  }

  /** Make one available button the tab stop. Call it after buttons were hidden or disabled. */
  refresh() {
    this.#hold(this.#current);
  }

  /** Focus a button. */
  focus(button) {
    this.#hold(button);
    button.focus();
  }

  #hold(button) {
    if (!button) return;
    for (const one of this.#root.querySelectorAll("button")) one.tabIndex = one === button ? 0 : -1;
  }

  #onKey(event) {
    const buttons = this.#buttons;
    const at = buttons.indexOf(event.target.closest("button"));
    if (at < 0) return;
    let next;
    if (event.key in STEPS) next = buttons[(at + STEPS[event.key] + buttons.length) % buttons.length];
    else if (event.key === "Home") next = buttons[0];
    else if (event.key === "End") next = buttons.at(-1);
    if (!next) return;
    event.preventDefault();
    next.focus();
  }
}
