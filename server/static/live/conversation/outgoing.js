/**
 * What goes with each message of sound: whether it takes a picture, and what its unit must do.
 *
 * A message has a second of sound, or a tenth of it where units may run early. The answers tell where the server's unit
 * ends, so that each unit gets one picture, half a second before its end, and a demand goes with every piece until a unit
 * has ended with it.
 */

const UNIT = 16000; // samples
export const PIECE = 1600;
const PIECES = UNIT / PIECE;
const SNAP = PIECES / 2 - 1; // the piece of a unit at which a picture is taken; the next one carries it

export class Outgoing {
  #sent = 0; // messages
  #edge = 0; // number of the last message that ended a unit
  #open = []; // messages without an answer: {number, once}
  #once = null; // demand of one unit: {force_listen: true} or {force_speak: true}

  /** Samples of a message. @param {object} config of the session */
  static length(config) {
    return config?.early_unit === "auto" ? PIECE : UNIT;
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
    const position = (this.#sent - this.#edge) % PIECES;
    return { picture: position === SNAP + 1, snap: position === SNAP };
  }

  /** Demands of the next message. @param {boolean} listens whether all units listen */
  demands(listens) {
    return listens ? { force_listen: true } : { ...this.#once };
  }

  /** A message was sent. @param {number} samples of it @param {object} demands it went with */
  add(samples, demands) {
    this.#sent += 1;
    const once = this.#once && Object.keys(this.#once).every((key) => demands[key]) ? this.#once : null;
    this.#open.push({ number: this.#sent, once });
    if (samples >= UNIT && (once || demands.force_listen)) this.#once = null;
  }

  /** The oldest message was answered. @param {boolean} isWhole whether it ended a unit */
  answered(isWhole) {
    const message = this.#open.shift();
    if (!message || !isWhole) return;
    this.#edge = message.number;
    if (message.once === this.#once) this.#once = null;
  }
}
