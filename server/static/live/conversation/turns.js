/** The model's turns: which one is open, its text and sound, and what is dropped after an interrupt. */

import { heardText } from "./heard.js";

const SOUND_RATE = 24000;

export class Turns {
  #stats;
  #sound;
  #ui;
  #open = null; // {number, cut, record}
  #last = 0;
  #marks = new Map(); // by turn: where its pieces of text begin, see `heardText`
  #dropThrough = 0; // sound of units up to this number is dropped

  /** @param {Stats} stats @param {Sound} sound @param {object} ui caption(turn, text) turnEnded(turn, cut, heard) */
  constructor(stats, sound, ui) {
    this.#stats = stats;
    this.#sound = sound;
    this.#ui = ui;
  }

  /** Number of the open turn; null if there is none. */
  get current() {
    return this.#open?.number ?? null;
  }

  open() {
    if (this.#open) return;
    const record = {
      turn: ++this.#last, text: "", sound_ms: 0, first_sound_ms: null, heard_ms: null, waited_ms: null, wait: null,
      cut: false, over: false,
    };
    this.#stats.turns.push(record);
    this.#marks.set(record.turn, []);
    this.#open = { number: record.turn, cut: false, record };
  }

  /** The open turn is complete. */
  close() {
    if (!this.#open) return;
    const { number, record, cut } = this.#open;
    record.over = true;
    this.#sound.player.endTurn(number);
    this.#open = null;
    if (!cut) this.#ui.turnEnded(number, false);
  }

  /** The open turn was interrupted: what still arrives of it is dropped. */
  cut() {
    if (!this.#open || this.#open.cut) return;
    this.#open.cut = this.#open.record.cut = true;
    this.#ui.turnEnded(this.#open.number, true);
  }

  /**
   * Playback of a turn was stopped: note what was heard of it.
   * @param {{turn: number, left: number}} playing samples that were not played @returns {object} turn, heard_sound_ms, heard_text
   */
  stamp({ turn, left }) {
    const record = this.#stats.turns[turn - 1];
    record.cut = true;
    record.heard_sound_ms = Math.max(0, record.sound_ms - (1000 * left) / SOUND_RATE);
    record.heard_text = heardText(record.text, this.#marks.get(turn), record.sound_ms, record.heard_sound_ms);
    this.#ui.turnEnded(turn, true, record.heard_text);
    const { heard_sound_ms, heard_text } = record;
    return { turn, heard_sound_ms, heard_text };
  }

  /** Nothing more arrives of the open turn. */
  abandon() {
    this.cut();
    this.#open = null;
  }

  /** Drop the sound of all units up to this one. */
  dropThrough(unit) {
    this.#dropThrough = unit;
  }

  addText(unit, text) {
    unit.text = (unit.text ?? "") + text;
    if (this.#open.cut) return;
    const { number, record } = this.#open;
    this.#marks.get(number).push({ sound_ms: record.sound_ms, characters: record.text.length });
    record.text += text;
    this.#ui.caption(this.#open.number, text);
  }

  /** @param {Float32Array} samples 24 kHz */
  addSound(unit, samples) {
    const now = performance.now();
    const turn = this.#open;
    const ms = (1000 * samples.length) / SOUND_RATE;
    unit.firstSound ??= now - unit.sentAt;
    turn.record.first_sound_ms ??= unit.firstSound;
    this.#stats.soundSeconds += ms / 1000;
    if (turn.cut || unit.number <= this.#dropThrough) {
      this.#stats.droppedMs += ms;
      return;
    }
    turn.record.sound_ms += ms;
    this.#sound.delay.add(turn.number, ms, now);
    this.#sound.tune();
    this.#sound.player.play(samples, turn.number);
  }

  /** The parts of the wait for the open turn. @param {object} wait of `waitOf` */
  measured(wait) {
    this.#open.record.wait = wait;
  }

  /** Playback of a turn has started. */
  started({ turn, waitedMs }) {
    const record = this.#stats.turns[turn - 1];
    if (!record || record.heard_ms !== null) return;
    record.waited_ms = waitedMs;
    record.heard_ms = (record.first_sound_ms ?? 0) + waitedMs;
  }
}
