/**
 * The delay between the first sound of a turn and its playback, adapted to the arrival times of earlier turns.
 *
 * For each turn this computes the smallest delay that would have avoided a gap. The result is the largest of the last
 * turns plus a margin.
 */

// The first unit of a turn brings less than a second of sound, because of the vocoder's lookahead.
const FIRST_UNIT_SHORT_MS = 160;
const PRIOR_MS = 60; // assumed jitter before the first turn
const MARGIN_MS = 40;
const MAX_MS = 1500;
const MIN_LOW_MS = 140;
const MAX_LOW_MS = 500;
const TURNS_KEPT = 8;

export class PlayoutDelay {
  /** minMs: lower bound, from the server's default or the user's setting. */
  constructor(minMs) {
    this.minMs = minMs;
    this.needs = []; // required delay of each turn in ms, newest last
    this.turn = null;
  }

  /** Record the arrival of `ms` of sound of turn `number` at time `now`, in ms. */
  add(number, ms, now) {
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

  /** Delay between the first sound of a turn and its playback. */
  get delayMs() {
    return Math.min(MAX_MS, Math.max(this.minMs, this.#need + MARGIN_MS));
  }

  /** Buffered sound below which playback is stretched. */
  get lowMs() {
    const jitter = this.#need - FIRST_UNIT_SHORT_MS + MIN_LOW_MS;
    return Math.min(MAX_LOW_MS, Math.max(MIN_LOW_MS, jitter, this.delayMs / 2));
  }
}
