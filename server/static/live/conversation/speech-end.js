/** The end of what the user says, in sound that is added in order: by its level, in frames of 10 ms. */

const RATE = 16000;
const FRAME = 160; // samples
const KEPT = 500; // frames whose quietest tenth is the noise
const ABOVE_NOISE = 4; // level of speech over that of the noise
const MIN_LEVEL = 0.005; // of speech
const MIN_FRAMES = 5; // of speech in a row, so that a click is none

export class SpeechEnd {
  #levels = []; // of the newest frames
  #rest = new Float32Array(0);
  #frames = 0;
  #loud = 0; // frames in a row
  #end = null; // frames up to the end of the newest speech
  #samples = 0;

  /** @param {Float32Array} samples at 16 kHz */
  add(samples) {
    const all = new Float32Array(this.#rest.length + samples.length);
    all.set(this.#rest);
    all.set(samples, this.#rest.length);
    const n = Math.floor(all.length / FRAME);
    const levels = Array.from({ length: n }, (_, i) => level(all.subarray(i * FRAME, (i + 1) * FRAME)));
    this.#rest = all.slice(n * FRAME);
    this.#samples += samples.length;
    this.#levels = [...this.#levels, ...levels].slice(-KEPT);
    const floor = [...this.#levels].sort((a, b) => a - b)[Math.floor(this.#levels.length / 10)] ?? 0;
    for (const one of levels) {
      this.#frames += 1;
      this.#loud = one > Math.max(ABOVE_NOISE * floor, MIN_LEVEL) ? this.#loud + 1 : 0;
      if (this.#loud >= MIN_FRAMES) this.#end = this.#frames;
    }
  }

  /** Where the newest speech ends, in ms since the first sample; null without speech. */
  get endMs() {
    return this.#end === null ? null : (1000 * this.#end * FRAME) / RATE;
  }

  /** Length of the sound so far, ms. */
  get ms() {
    return (1000 * this.#samples) / RATE;
  }
}

function level(frame) {
  let sum = 0;
  for (const sample of frame) sum += sample * sample;
  return Math.sqrt(sum / frame.length);
}
