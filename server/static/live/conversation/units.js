/** The units that were sent: which answer belongs to which, and what the answers say. */

import { Outgoing } from "./outgoing.js";
import { SpeechEnd } from "./speech-end.js";

const RATE = 16000;
const NEAR_MS = 600; // after speech
const MAX_UNANSWERED_S = 20; // of sound without an answer, after which the connection counts as broken
const MAX_MOVING_S = 90; // the same while the session waits for another worker

export class Units {
  #stats;
  #turns;
  #outgoing;
  #capture;
  #config = null; // settings of the session
  #length = 0; // samples of a message
  #end = 0; // end of the last message, in samples of the microphone
  #edge = 0; // end of the server's unit, in samples of the microphone modulo a second
  #waiting = []; // sent and not answered: {number, sentAt, samples, asked, sinceMs, opens, firstSound, text}
  #speech = new SpeechEnd();
  #isMoving = false;
  #answeredMs = 0; // end of the speech that the last turn has answered

  /** @param {Stats} stats @param {Turns} turns @param {Outgoing} outgoing @param {Capture} capture */
  constructor(stats, turns, outgoing, capture) {
    this.#capture = capture;
    this.#stats = stats;
    this.#turns = turns;
    this.#outgoing = outgoing;
    this.clear();
  }

  /** The settings of the session have changed. @param {object} config */
  configure(config) {
    this.#config = config;
    this.#cut();
  }

  /**
   * Let the microphone send messages of the length that the session needs now, none of which crosses the end of the
   * server's unit. They are short after speech, since a pause may come.
   */
  #cut() {
    const { endMs, ms } = this.#speech;
    const length = Outgoing.length(this.#config, endMs !== null && ms - endMs < NEAR_MS);
    const edge = (this.#end + this.#outgoing.rest) % RATE;
    if (length !== this.#length || edge !== this.#edge) this.#capture.cut(length, edge);
    this.#length = length;
    this.#edge = edge;
  }

  /** Length of the sound without an answer, s. */
  get #waitingS() {
    return this.#waiting.reduce((sum, { samples }) => sum + samples, 0) / RATE;
  }

  /** Whether so much sound has no answer that the connection counts as broken. */
  get isOverdue() {
    return this.#waitingS > (this.#isMoving ? MAX_MOVING_S : MAX_UNANSWERED_S);
  }

  /** Answers come later: the session waits for another worker. @param {string} reason @returns {string} code of the notice */
  waitForWorker(reason) {
    this.#isMoving = true;
    return `moving_${reason}`;
  }

  /** Seconds since the oldest unit without an answer was sent; 0 if there is none. */
  get unansweredS() {
    return this.#waiting.length ? (performance.now() - this.#waiting[0].sentAt) / 1000 : 0;
  }

  /**
   * A unit, or a piece of one, was sent.
   * @param {Float32Array} samples at 16 kHz
   * @param {number} end of the sound, in samples of the microphone
   * @param {object} demands of its unit
   */
  add(samples, end, demands) {
    this.#outgoing.add(samples.length, demands);
    this.#end = end;
    this.#stats.units += 1;
    const { length } = samples;
    this.#speech.add(samples);
    const { endMs: asked, ms } = this.#speech;
    this.#waiting.push({ number: this.#stats.units, sentAt: performance.now(), samples: length, asked,
      sinceMs: asked === null ? null : ms - asked, opens: false, firstSound: null });
    this.#cut();
  }

  /** Nothing is answered any more. */
  clear() {
    this.#waiting = [];
    this.#outgoing.clear();
  }

  /** An error took the place of a result. */
  skip() {
    this.#waiting.shift();
    this.#outgoing.refused();
    this.#cut();
  }

  /** @param {object} message `partial` */
  takePartial(message) {
    const unit = this.#waiting[0];
    if (!unit) return;
    this.#open(unit);
    if (message.text) this.#turns.addText(unit, message.text);
    if (message.sound) this.#turns.addSound(unit, message.sound);
  }

  #open(unit) {
    unit.opens ||= this.#turns.current === null;
    this.#turns.open();
  }

  /**
   * @param {object} message `result` @returns {object|null} it with the page's times; null if it was not expected, or
   *   if its sound waits for the rest of its unit
   */
  takeResult(message) {
    const unit = this.#waiting.shift();
    if (this.#waitingS <= MAX_UNANSWERED_S) this.#isMoving = false;
    this.#outgoing.answered(!message.incomplete);
    if (!unit || message.incomplete) return null;
    this.#cut();
    const now = performance.now();
    if (!message.is_listen) this.#open(unit);
    if (message.sound) this.#turns.addSound(unit, message.sound);
    if (message.text && !unit.text) this.#turns.addText(unit, message.text);
    const { type, sound, ...facts } = message;
    const result = { ...facts, unit: unit.number, turn: this.#turns.current, reply_ms: now - unit.sentAt,
      first_sound_ms: unit.firstSound };
    this.#stats.results.push(result);
    if (unit.opens && unit.firstSound !== null && unit.asked > this.#answeredMs) {
      this.#answeredMs = unit.asked;
      this.#turns.measured(waitOf(message, unit));
    }
    if (message.is_listen || message.end_of_turn) this.#turns.close();
    return result;
  }
}

/**
 * The parts of the wait for a turn, ms, without playback: from the end of speech to the end of the sound that the unit
 * ran with, in the worker up to the vocoder, in the vocoder, and between page and worker. `saved`: silence for which an
 * early unit did not wait.
 */
export function waitOf({ stages = {}, lag_ms: lag = 0, shift_ms: saved = 0 }, { sinceMs, firstSound }) {
  // `first_sound` counts from the engine's inbox; `lag_ms` has the time in front of it, and once more that in it.
  const worker = (stages.first_sound ?? 0) + lag - (stages.wait ?? 0);
  const vocoder = stages.first_vocoder ?? 0;
  return { alignment: sinceMs, saved, model: worker - vocoder, vocoder, transport: firstSound - worker };
}
