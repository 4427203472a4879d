/** The units that were sent: which answer belongs to which, and what the answers say. */

export class Units {
  #stats;
  #turns;
  #waiting = []; // sent and not answered: {number, sentAt, firstSound, text}

  /** @param {Stats} stats @param {Turns} turns */
  constructor(stats, turns) {
    this.#stats = stats;
    this.#turns = turns;
  }

  get nWaiting() {
    return this.#waiting.length;
  }

  /** Seconds since the oldest unit without an answer was sent; 0 if there is none. */
  get unansweredS() {
    return this.#waiting.length ? (performance.now() - this.#waiting[0].sentAt) / 1000 : 0;
  }

  /** A unit was sent. */
  add() {
    this.#stats.units += 1;
    this.#waiting.push({ number: this.#stats.units, sentAt: performance.now(), firstSound: null });
  }

  /** Nothing is answered any more. */
  clear() {
    this.#waiting = [];
  }

  /** An error took the place of a result. */
  skip() {
    this.#waiting.shift();
  }

  /** @param {object} message `partial` */
  takePartial(message) {
    const unit = this.#waiting[0];
    if (!unit) return;
    this.#turns.open();
    if (message.text) this.#turns.addText(unit, message.text);
    if (message.sound) this.#turns.addSound(unit, message.sound);
  }

  /** @param {object} message `result` @returns {object|null} it with the page's times; null if it was not expected */
  takeResult(message) {
    const unit = this.#waiting.shift();
    if (!unit) return null;
    const now = performance.now();
    if (!message.is_listen) this.#turns.open();
    if (message.sound) this.#turns.addSound(unit, message.sound);
    if (message.text && !unit.text) this.#turns.addText(unit, message.text);
    const { type, sound, ...facts } = message;
    const result = { ...facts, unit: unit.number, turn: this.#turns.current, reply_ms: now - unit.sentAt,
      first_sound_ms: unit.firstSound };
    this.#stats.results.push(result);
    if (message.is_listen || message.end_of_turn) this.#turns.close();
    return result;
  }
}
