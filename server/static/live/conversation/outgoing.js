/**
 * What goes with each message of sound: whether it takes a picture, and what its unit must do.
 *
 * A message has a second of sound. Where units may run early, it has a tenth of it, and 40 ms beside the user's speech,
 * so that a pause is found soon. The answers show where the server's unit ends. A message ends there; each unit gets
 * one picture, half a second before its end; and a demand goes with every piece until a unit has ended with it.
 */

const UNIT = 16000; // samples
export const PIECE = 1600;
const SPOKEN_PIECE = 640;
const PICTURE = UNIT / 2; // sample of a unit whose piece carries a picture
const SNAP = PICTURE - PIECE; // sample whose piece takes it

export class Outgoing {
  #sent = 0; // samples
  #edge = 0; // sample at which the last unit ended
  #open = []; // messages without an answer: {end, samples, once}
  #once = null; // demand of one unit: {force_listen: true} or {force_speak: true}

  /** Samples of a message. @param {object} config of the session @param {boolean} isNear the user speaks or just did */
  static length(config, isNear = false) {
    if (config?.early_unit !== "auto") return UNIT;
    return isNear ? SPOKEN_PIECE : PIECE;
  }

  /** Samples from the end of the last message to the end of the server's unit. */
  get rest() {
    return UNIT - ((this.#sent - this.#edge) % UNIT);
  }

  /** A new context: nothing is answered any more. */
  clear() {
    this.#sent = this.#edge = 0;
    this.#open = [];
    this.#once = null;
  }

  /** The next unit listens, because the user has interrupted. */
  listenOnce() {
    this.#once = { force_listen: true };
  }

  /** The next unit speaks, because the user has written, unless it has to listen. */
  speakOnce() {
    this.#once ??= { force_speak: true };
  }

  /** @param {number} samples of the next message @returns {{picture: boolean, snap: boolean}} what the camera does */
  next(samples) {
    if (samples >= UNIT) return { picture: true, snap: false };
    const begin = (this.#sent - this.#edge) % UNIT;
    const has = (sample) => begin <= sample && sample < begin + samples;
    return { picture: has(PICTURE), snap: has(SNAP) };
  }

  /** Demands of the next message. @param {boolean} listens whether all units listen */
  demands(listens) {
    return listens ? { force_listen: true } : { ...this.#once };
  }

  /** A message was sent. @param {number} samples of it @param {object} demands it went with */
  add(samples, demands) {
    this.#sent += samples;
    const once = this.#once && Object.keys(this.#once).every((key) => demands[key]) ? this.#once : null;
    this.#open.push({ end: this.#sent, samples, once });
    if (samples >= UNIT && (once || demands.force_listen)) this.#once = null;
  }

  /**
   * The oldest message was answered. A unit that is full within a message ends there, and the next one has its rest.
   * @param {boolean} isWhole whether it ended a unit
   */
  answered(isWhole) {
    const message = this.#open.shift();
    if (!message || !isWhole) return;
    const { end, samples } = message;
    const over = (end - this.#edge) % UNIT;
    this.#edge = end - this.#edge >= UNIT && over < samples ? end - over : end;
    if (message.once === this.#once) this.#once = null;
  }

  /** The oldest message was refused: its sound is in no unit. */
  refused() {
    this.#edge += this.#open.shift()?.samples ?? 0;
  }
}
