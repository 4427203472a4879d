/** Confirms that speech has begun: enough of it without a pause, and not the echo of what is played. */

const WINDOW_MS = 32;
const SPEECH = 0.5; // probability of a window that is speech
const RISING = 0.1; // the network hesitates at an onset: windows from this on count, once speech follows
const MAX_RISING = 4; // windows
const PAUSE = 0.35; // probability after speech below which the count starts again

export class Onset {
  #rising = 0; // windows before the first of speech
  #speech = 0; // windows from the first of speech on
  #reported = false;
  confirmMs = 200;

  reset() {
    this.#rising = this.#speech = 0;
    this.#reported = false;
  }

  /**
   * @param {number} probability of the newest window
   * @param {() => boolean} isEcho whether the last windows are what is played; called only where it decides
   * @returns {boolean} whether speech is confirmed by this window; once until `reset`
   */
  add(probability, isEcho) {
    if (probability >= SPEECH) this.#speech += 1;
    else if (this.#speech && probability < PAUSE) this.#rising = this.#speech = 0;
    else if (!this.#speech) this.#rising = probability < RISING ? 0 : Math.min(MAX_RISING, this.#rising + 1);
    const isLong = this.ms >= this.confirmMs && 2 * this.#speech * WINDOW_MS >= this.confirmMs;
    if (this.#reported || !this.#speech || !isLong) return false;
    this.#reported = !isEcho();
    return this.#reported;
  }

  /** Speech so far, ms. */
  get ms() {
    return this.#speech ? WINDOW_MS * (this.#rising + this.#speech) : 0;
  }
}
