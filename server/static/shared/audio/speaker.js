/** Speech of answers: gapless playback of parts that may arrive faster than they are heard. */

import { Player } from "./player.js";
import { PlayoutDelay } from "./playout-delay.js";

const MIN_DELAY_MS = 200;
const MAX_DEPTH_MS = 20_000; // sound passed to the audio thread, which drops sound above a minute
const SLICE = 24_000; // samples passed at a time

export class Speaker {
  #on;
  #player;
  #delay = new PlayoutDelay(MIN_DELAY_MS);
  #waiting = []; // slices that the audio thread has not received
  #over = new Set(); // complete turns
  #turn = 0;
  #depthMs = 0;
  isPlaying = false; // from the first sound of an answer to its last

  /** @param {AudioContext} context after `Player.load` @param {object} on {changed(isPlaying), level(rms)} */
  constructor(context, on) {
    this.#on = on;
    this.#player = new Player(context, {
      ended: ({ turn }) => turn === this.#turn && this.#over.has(turn) && this.#show(false),
      level: ({ rms, depthMs }) => {
        this.#depthMs = depthMs;
        this.#feed();
        on.level?.(rms);
      },
    });
  }

  /** The speech as a node. */
  get output() {
    return this.#player.output;
  }

  #show(isPlaying) {
    if (isPlaying === this.isPlaying) return;
    this.isPlaying = isPlaying;
    this.#on.changed(isPlaying);
  }

  /** Begin an answer; the sound of the one before is discarded. */
  begin() {
    this.silence();
    this.#turn += 1;
  }

  /** @param {Float32Array} samples 24 kHz, further sound of the answer */
  add(samples) {
    this.#delay.add(this.#turn, samples.length / 24, performance.now());
    this.#player.tune(this.#delay.delayMs, this.#delay.lowMs);
    this.#show(true);
    for (let at = 0; at < samples.length; at += SLICE) this.#waiting.push(samples.slice(at, at + SLICE));
    this.#feed();
  }

  /** The answer is complete. */
  end() {
    this.#over.add(this.#turn);
    this.#feed();
  }

  #feed() {
    while (this.#waiting.length && this.#depthMs < MAX_DEPTH_MS) {
      const slice = this.#waiting.shift();
      this.#depthMs += slice.length / 24;
      this.#player.play(slice, this.#turn);
    }
    if (!this.#waiting.length && this.#over.has(this.#turn)) this.#player.endTurn(this.#turn);
  }

  /** Discard all sound. */
  silence() {
    this.#waiting = [];
    this.#depthMs = 0;
    this.#player.flush().catch(() => {}); // the audio thread has ended
    this.#show(false);
  }

  close() {
    this.silence();
    this.#player.close();
  }
}
