/**
 * Confirms that speech has begun: enough of it without a pause.
 *
 * The network hesitates at an onset, so speech begins with the loud or doubtful frames that lead into the first window
 * which the network recognizes. The sum of probabilities decides together with the duration, because loud frames alone
 * are no speech.
 */

import { FRAMES, FRAME_MS } from "./bands.js";

const FIRST = 0.4; // probability of the first window of speech
const DOUBTFUL = 0.05; // probability of a window that may lead into speech
const LEAD = 6; // windows that may lead into speech
const MAX_GAP = 1; // quiet frames between those that lead into speech
const SPEECH = 0.35; // probability of a later window of speech
const NO_SPEECH = 0.1; // probability below which a loud window ends speech too
const MAX_MASKED = 1; // windows in a row that echo may mask without ending speech
const HIDDEN = 8; // frames of an onset that background noise hides
const EVIDENCE = 0.013; // sum of probabilities for each ms to confirm: 2.6 for 200 ms
const OVERLAP_MS = 16; // length of a frame: it may be loud that much before the onset

export class Onset {
  #windows = []; // [probability, loud frames] of the last windows without speech
  #frames = 0; // from the onset on
  #evidence = 0;
  #masked = 0; // windows in a row
  #reported = false;
  confirmMs = 200;

  reset() {
    this.#windows = [];
    this.#frames = this.#evidence = this.#masked = 0;
    this.#reported = false;
  }

  /**
   * @param {number} probability of the newest window; 0 if it is echo
   * @param {Uint8Array} loud its four frames
   * @param {boolean} isHidden whether the background may hide its onset
   * @param {boolean} isMasked whether echo may hide speech in the window
   * @returns {boolean} whether speech is confirmed by this window; once until `reset`
   */
  add(probability, loud, isHidden, isMasked = false) {
    this.#masked = isMasked ? this.#masked + 1 : 0;
    if (this.#frames && isMasked && this.#masked <= MAX_MASKED) this.#frames += FRAMES;
    else if (this.#frames) this.#continue(probability, loud);
    else if (probability >= FIRST) this.#begin(probability, loud, isHidden);
    if (!this.#frames) {
      this.#windows.push([probability, Uint8Array.from(loud)]);
      if (this.#windows.length > LEAD) this.#windows.shift();
    }
    if (this.#reported || this.ms < this.confirmMs || this.#evidence < EVIDENCE * this.confirmMs) return false;
    this.#reported = true;
    return true;
  }

  #begin(probability, loud, isHidden) {
    let lead = 0;
    for (let back = 1, gap = 0; back <= FRAMES * this.#windows.length && gap <= MAX_GAP; back++) {
      const [before, frames] = this.#windows.at(-Math.ceil(back / FRAMES));
      gap = frames.at(-1 - ((back - 1) % FRAMES)) || before >= DOUBTFUL ? 0 : gap + 1;
      if (!gap) lead = back;
    }
    if (!lead) lead = -Math.max(0, loud.indexOf(1));
    this.#frames = FRAMES + (isHidden ? Math.max(lead, HIDDEN) : lead);
    this.#evidence = probability;
    this.#windows = [];
  }

  #continue(probability, loud) {
    const isQuiet = loud[0] + loud[1] + loud[2] + loud[3] < FRAMES / 2;
    if (probability < NO_SPEECH || (probability < SPEECH && isQuiet)) {
      this.#frames = this.#evidence = 0;
      return;
    }
    this.#frames += FRAMES;
    if (probability >= SPEECH) this.#evidence += probability;
  }

  /** Whether speech has begun and not paused. */
  get isOpen() {
    return this.#frames > 0;
  }

  /** Speech so far, ms. */
  get ms() {
    return Math.max(0, FRAME_MS * this.#frames - OVERLAP_MS);
  }
}
