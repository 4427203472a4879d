/** Keys: Space and Escape interrupt; single letters press buttons, unless the user has turned that off. */

import { byId, make, takesKeys } from "../../shared/dom.js";
import { setText } from "../../shared/i18n.js";

const LETTERS = { m: "mute", c: "camera", p: "pause", l: "listen", f: "full", "?": "open-help" };
const SHOWN = [
  [["Space", "Esc"], "interrupt"], [["M"], "mute"], [["P"], "pause"], [["L"], "listen"], [["C"], "camera"],
  [["F"], "fullscreen"], [["?"], "help"], [["←", "→"], "keys_toolbar"],
];

/**
 * @param {object} on isLive(): boolean. interrupt(). press(id): a button by its id. closeMore(): boolean, whether
 *   something was closed. letters(): boolean, whether letters press buttons
 */
export function listenToKeys(on) {
  addEventListener("keydown", (event) => {
    if (event.repeat || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const letter = LETTERS[event.key.toLowerCase()];
    const isTyping = event.target.closest?.("input:not([type=range], [type=checkbox]), select, textarea");
    if (event.key === "Escape" && on.closeMore()) event.preventDefault();
    else if (event.key === "Escape" || (event.key === " " && !takesKeys(event.target))) {
      if (!on.isLive()) return;
      event.preventDefault();
      on.interrupt();
    } else if (letter && !isTyping && on.letters()) on.press(letter);
  });
}

/** Fill the list of keys in the help. */
export function drawKeys() {
  byId("keys").append(...SHOWN.map(([keys, key]) => {
    const text = make("dd", {});
    setText(text, key);
    return make("div", {}, make("dt", {}, ...keys.map((one) => make("kbd", {}, one))), text);
  }));
}
