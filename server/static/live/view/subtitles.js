/** Subtitles over the picture in fullscreen, and the fullscreen itself. */

import { byId } from "../../shared/dom.js";

const MAX_CHARS = 160;

/** The last part of a turn's text, cut at a space. */
export function lastWords(text, max = MAX_CHARS) {
  if (text.length <= max) return text;
  const tail = text.slice(-max);
  return `… ${tail.slice(tail.indexOf(" ") + 1)}`;
}

/** @param {string} text of the current turn */
export function showSubtitles(text) {
  byId("subtitles").textContent = lastWords(text);
}

export const canFullscreen = () => document.fullscreenEnabled ?? false;

export async function toggleFullscreen() {
  if (document.fullscreenElement) await document.exitFullscreen();
  else await byId("stage").requestFullscreen();
}
