/** Buttons and players inside entries. */

import { make } from "../shared/dom.js";
import { clock, t } from "../shared/i18n.js";

const sound = new Audio(); // one for all units, so that two never play at once
let playing = null; // its button

/** A button that plays the replay from here. */
export function seekButton(at, onPlay) {
  return make("button", { class: "quiet at", type: "button", "aria-label": t("play_from", { time: clock(at) }), onclick: () => onPlay(at) }, clock(at));
}

/** A button that plays and stops one sound. @param {string} key of its name */
export function soundOf(address, key) {
  const button = make("button", { class: "button small", type: "button", "aria-pressed": "false" }, t(key));
  button.onclick = () => (playing === button ? stop() : start(button, address));
  return button;
}

/** A player. @param {"audio"|"video"} kind @param {string} key of its name */
export const playerOf = (kind, address, key) =>
  make(kind, { controls: true, preload: "none", playsinline: kind === "video", src: address, "aria-label": t(key) });

function start(button, address) {
  stop();
  playing = button;
  button.setAttribute("aria-pressed", "true");
  sound.src = address;
  sound.onended = stop;
  sound.play().catch(() => playing === button && stop()); // the next sound interrupts it, or it cannot be decoded
}

function stop() {
  sound.pause();
  playing?.setAttribute("aria-pressed", "false");
  playing = null;
}
