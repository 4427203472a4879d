/** Delays between attempts to reconnect: they double, with some randomness, so that clients do not return all at once. */

const FIRST_S = 1;
const MAX_S = 15;
const MAX_ATTEMPTS = 12;
const SPREAD = 0.2;

export class Backoff {
  #firstS;
  #maxS;
  #maxAttempts;
  attempts = 0;

  constructor(firstS = FIRST_S, maxS = MAX_S, maxAttempts = MAX_ATTEMPTS) {
    this.#firstS = firstS;
    this.#maxS = maxS;
    this.#maxAttempts = maxAttempts;
  }

  /** Seconds until the next attempt; null after the last one. @param {() => number} random 0 to 1 */
  next(random = Math.random) {
    if (this.attempts >= this.#maxAttempts) return null;
    const seconds = Math.min(this.#maxS, this.#firstS * 2 ** this.attempts++);
    return seconds * (1 + SPREAD * (2 * random() - 1));
  }

  reset() {
    this.attempts = 0;
  }
}
