/** The toolbar's buttons: icon, name, key. The order is that of the toolbar. */

import { icon, make, setIcon } from "../../shared/dom.js";
import { label, setText } from "../../shared/i18n.js";

/** id, icon, key of the text, key of the accessible name, key on the keyboard */
export const BUTTONS = [
  ["mute", "mic", "mute", "mute", "M"],
  ["camera", "camera", "camera", "camera_off", "C"],
  ["pause", "pause", "pause", "pause", "P"],
  ["interrupt", "cut", "interrupt", "interrupt_hint", "Esc"],
  ["listen", "ear", "listen", "listen_hint", "L"],
  ["open-more", "more", "more", "more", ""],
  ["stop", "close", "stop", "stop", ""],
];

const TOGGLES = ["mute", "camera", "listen"];

/** Create the buttons inside the toolbar. */
export function makeButtons(toolbar) {
  for (const [id, name, text, title, key] of BUTTONS) {
    const button = make("button", { type: "button", id, class: id === "stop" ? "end" : null }, icon(name));
    const shown = make("span", {});
    setText(shown, text);
    label(button, title);
    button.append(shown);
    if (key) button.append(make("kbd", { "aria-hidden": "true" }, key));
    if (TOGGLES.includes(id)) button.setAttribute("aria-pressed", "false");
    if (id === "open-more") {
      button.setAttribute("aria-expanded", "false");
      button.setAttribute("aria-controls", "more");
    }
    toolbar.append(button);
  }
}

/** Change a button. text: key of the text under the icon; it is part of the accessible name `key`. */
export function change(button, { icon: name, text, key = text, pressed }) {
  if (pressed !== undefined) button.setAttribute("aria-pressed", pressed);
  setText(button.querySelector("span"), text);
  label(button, key);
  setIcon(button, name);
}
