/**
 * Whether the microphone's sound is the echo of what was played shortly before.
 *
 * The browser removes the echo of the loudspeaker, but not all of it. What is left is quieter than the sound that is
 * played and has a similar spectrogram. Room and loudspeaker change its phase and its tone color, so levels of bands are
 * compared, without their means, at all delays up to half a second.
 */

const BINS = 129;
const FRAMES = 4; // of a window, 8 ms each
const EDGES = [3, 5, 7, 9, 11, 13, 16, 19, 23, 28, 34, 42, 52, 64, 80]; // bins of 62.5 Hz: 190 Hz to 5 kHz
const BANDS = EDGES.length - 1;
const SPAN = 28; // frames that are compared: 224 ms
const MAX_DELAY = 64; // frames: 512 ms
const KEPT = SPAN + MAX_DELAY;
const LOUD = 0.4; // of the amplitude that is played: louder sound is no echo (-8 dB)
const DIFFERENT = 0.3; // similarity below which quieter sound is no echo
const FLOOR = 1e-3; // magnitude; quieter bands count as silent

export class Echo {
  #mic = new Float32Array(KEPT * BANDS); // levels in nepers, newest frame last
  #played = new Float32Array(KEPT * BANDS);
  #a = new Float32Array(SPAN * BANDS);
  #b = new Float32Array(SPAN * BANDS);

  constructor() {
    this.reset();
  }

  reset() {
    this.#mic.fill(Math.log(FLOOR));
    this.#played.fill(Math.log(FLOOR));
  }

  /** Append a window. @param {Float32Array} mic [4, 129] magnitudes @param {Float32Array} played the same */
  add(mic, played) {
    append(this.#mic, mic);
    append(this.#played, played);
  }

  /** Whether the last 224 ms are echo. */
  get isEcho() {
    const mic = amplitude(this.#mic, KEPT - SPAN);
    let played = 0;
    for (let delay = 0; delay <= MAX_DELAY; delay += FRAMES) {
      played = Math.max(played, amplitude(this.#played, KEPT - SPAN - delay));
    }
    return mic < LOUD * played && this.similarity >= DIFFERENT;
  }

  /** From -1 to 1: the highest correlation over all delays of the last 224 ms with what was played; 0 after silence. */
  get similarity() {
    centred(this.#mic, KEPT - SPAN, this.#a);
    let best = 0;
    for (let delay = 0; delay <= MAX_DELAY; delay++) {
      if (!centred(this.#played, KEPT - SPAN - delay, this.#b)) continue;
      let sum = 0;
      for (let i = 0; i < SPAN * BANDS; i++) sum += this.#a[i] * this.#b[i];
      best = Math.max(best, sum);
    }
    return best;
  }
}

function append(levels, spectrum) {
  levels.copyWithin(0, FRAMES * BANDS);
  const start = levels.length - FRAMES * BANDS;
  for (let frame = 0; frame < FRAMES; frame++) {
    for (let band = 0; band < BANDS; band++) {
      let sum = 0;
      for (let bin = EDGES[band]; bin < EDGES[band + 1]; bin++) sum += spectrum[frame * BINS + bin] ** 2;
      levels[start + frame * BANDS + band] = Math.log(FLOOR + Math.sqrt(sum));
    }
  }
}

/** Effective amplitude of SPAN frames from `from` on. */
function amplitude(levels, from) {
  let sum = 0;
  for (let i = from * BANDS; i < (from + SPAN) * BANDS; i++) sum += Math.exp(2 * levels[i]);
  return Math.sqrt(sum / SPAN);
}

/** SPAN frames from `from` on, without the mean of each band, with norm 1. @returns {boolean} false if they are silent */
function centred(levels, from, out) {
  let power = 0;
  for (let band = 0; band < BANDS; band++) {
    let mean = 0;
    for (let i = 0; i < SPAN; i++) mean += levels[(from + i) * BANDS + band] / SPAN;
    for (let i = 0; i < SPAN; i++) {
      const value = levels[(from + i) * BANDS + band] - mean;
      out[i * BANDS + band] = value;
      power += value * value;
    }
  }
  const norm = Math.sqrt(power);
  if (norm < 1) return false;
  for (let i = 0; i < out.length; i++) out[i] /= norm;
  return true;
}
