/**
 * How long a turn's first sound is held back, learned from how sound came so far.
 *
 * For every turn it works out the delay with which nothing would have been missing, and asks for the largest of the
 * last turns and a margin. Knows arrival times only.
 */

const FIRST_UNIT_SHORT_MS = 160; // a turn's first second brings less than a second: the vocoder looks ahead
const PRIOR_MS = 100; // uncertainty before any turn was heard
const MARGIN_MS = 40;
const MOST_MS = 1500;
const LEAST_LOW_MS = 140;
const MOST_LOW_MS = 500;
const TURNS_KEPT = 8;

export class Cushion {
  /** floorMs: never less than this, as the server's operator or the user wants it. */
  constructor(floorMs) {
    this.floorMs = floorMs;
    this.needs = []; // ms, by turn, the newest last
    this.turn = null;
  }

  /** Sound of `ms` of turn `number` came at `now`, ms. */
  heard(number, ms, now) {
    if (this.turn?.number !== number) {
      this.turn = { number, first: now, sound: 0, need: 0 };
      this.isNew = true;
    }
    const { turn } = this;
    turn.need = Math.max(turn.need, now - turn.first - turn.sound);
    turn.sound += ms;
    if (turn.need > 0 && turn.sound > 1000) {
      if (this.isNew) this.needs.push(0);
      this.isNew = false;
      this.needs[this.needs.length - 1] = turn.need;
      if (this.needs.length > TURNS_KEPT) this.needs.shift();
    }
  }

  get #need() {
    return this.needs.length ? Math.max(...this.needs) : FIRST_UNIT_SHORT_MS + PRIOR_MS;
  }

  /** Between a turn's first sound and its start. */
  get delayMs() {
    return Math.min(MOST_MS, Math.max(this.floorMs, this.#need + MARGIN_MS));
  }

  /** With less than this left, time is stretched. */
  get lowMs() {
    const shaky = this.#need - FIRST_UNIT_SHORT_MS + LEAST_LOW_MS;
    return Math.min(MOST_LOW_MS, Math.max(LEAST_LOW_MS, shaky, this.delayMs / 2));
  }
}
