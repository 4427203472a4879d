/**
 * How loud the echo of what is played is in the microphone.
 *
 * The browser removes the echo of the loudspeaker, but not all of it. What is left follows the levels of the played
 * sound with a delay, a gain in each band and the room's decay. Those are measured while the model speaks: the delay as
 * the one with the highest correlation of levels, the gain as the median ratio at that delay.
 */

import { BANDS, FRAMES } from "./bands.js";

const DELAYS = 65; // frames: up to 512 ms
const KEPT = 248; // frames for the gains: 2 s
const SIZE = KEPT + DELAYS;
const UPDATE = 4; // windows between two measurements of the gains
const MEAN = 0.95; // of the mean level that is kept for each frame: 160 ms
const MEMORY = 0.9947; // of the correlation: 1.5 s
const DECAY = 0.9; // of the room for each frame: 0.9 dB
const SIMILAR = 0.3; // correlation from which there is an echo
const DOUBTFUL = 0.25; // the same while the gains are not known
const ABOVE = 2.5; // times the predicted echo: other sound (8 dB)
const ABOVE_BANDS = 5; // with other sound in a frame that is not echo
const AUDIBLE = 0.01; // amplitude
const PLAYED = 0.05; // amplitude from which a frame of the played sound counts
const MEASURED = 0.02; // amplitude of the played sound from which a band counts for its gain
const MIN_MEASURED = 12; // frames of a band
const LEARNING = 150; // frames of played sound after which the gains are known
// Before that: `gain` is the guess, sound above `veryLoud` of the played amplitude is not echo.
const UNCANCELLED = { gain: 0.4, veryLoud: 0.7 };
const CANCELLED = { gain: 0.15, veryLoud: 0.27 }; // with the browser's echo canceller
const SPAN = 28; // frames whose amplitude is compared for that
const FLOOR = 1e-3; // amplitude

export class Echo {
  // Rings of the last frames; frame t is in row t % SIZE.
  #mic = new Float32Array(SIZE * BANDS);
  #tail = new Float32Array(SIZE * BANDS); // the played sound with the room's decay
  #level = new Float32Array(SIZE * BANDS); // logarithm of the played sound, without its mean
  #power = [new Float32Array(SIZE), new Float32Array(SIZE)]; // of microphone and played sound
  #means = [new Float32Array(BANDS), new Float32Array(BANDS)];
  #last = new Float32Array(BANDS); // row of `#tail`
  #products = new Float32Array(DELAYS);
  #playedPowers = new Float32Array(DELAYS);
  #micPower = 0;
  #gains = new Float32Array(BANDS);
  #ratios = new Float32Array(KEPT);
  #time = 0; // frames since the reset
  #played = 0; // of them with played sound
  #heard = 0; // time of the last one
  #delay = 0;
  isPresent = false; // the newest window may be echo
  isCancelled = false; // the browser's echo canceller is active; stays as it is on `reset`

  constructor() {
    this.reset();
  }

  reset() {
    for (const array of [this.#mic, this.#tail, this.#level, ...this.#power, this.#last, this.#gains]) array.fill(0);
    for (const mean of this.#means) mean.fill(Math.log(FLOOR));
    this.#products.fill(0);
    this.#playedPowers.fill(1e-9);
    this.#micPower = 1e-9;
    this.#time = this.#played = this.#delay = 0;
    this.#heard = -Infinity;
    this.isPresent = false;
  }

  /**
   * Append a window.
   * @param {Float32Array} mic [4, 14] amplitudes @param {Float32Array} played the same
   * @param {boolean} isUser the user speaks, so nothing is learned from it
   */
  add(mic, played, isUser = false) {
    for (let frame = 0; frame < FRAMES; frame++) {
      const [from, to] = [frame * BANDS, (frame + 1) * BANDS];
      this.#append(mic.subarray(from, to), played.subarray(from, to), isUser);
    }
    let similarity = 0;
    for (let delay = 0; delay < DELAYS; delay++) {
      const one = this.#products[delay] / Math.sqrt(this.#micPower * this.#playedPowers[delay]);
      if (one > similarity) [similarity, this.#delay] = [one, delay];
    }
    if ((this.#time / FRAMES) % UPDATE === 0 && !isUser) this.#measure();
    this.isPresent = similarity >= (this.#played < LEARNING ? DOUBTFUL : SIMILAR) && !this.#isVeryLoud;
  }

  /** Whether a frame of the newest window has other sound than echo. @param {Float32Array} mic its window */
  isOther(frame, mic) {
    const at = this.#time - FRAMES + frame;
    let bands = 0;
    for (let band = 0; band < BANDS; band++) {
      let echo = this.#gains[band] * this.#tail[row(at - this.#delay) + band];
      if (this.#played < LEARNING) {
        for (let delay = 0; delay < DELAYS; delay++) {
          echo = Math.max(echo, this.#guess.gain * this.#tail[row(at - delay) + band]);
        }
      }
      if (mic[frame * BANDS + band] > Math.max(ABOVE * echo, AUDIBLE)) bands += 1;
    }
    return bands >= ABOVE_BANDS;
  }

  #append(mic, played, isUser) {
    const start = row(this.#time);
    const [micMean, playedMean] = this.#means;
    let [micPower, playedPower, highest] = [0, 0, 0];
    for (let band = 0; band < BANDS; band++) {
      highest = Math.max(highest, played[band]);
      micPower += mic[band] ** 2;
      playedPower += played[band] ** 2;
      const level = Math.log(FLOOR + played[band]);
      micMean[band] = MEAN * micMean[band] + (1 - MEAN) * Math.log(FLOOR + mic[band]);
      playedMean[band] = MEAN * playedMean[band] + (1 - MEAN) * level;
      this.#level[start + band] = level - playedMean[band];
      this.#last[band] = Math.max(played[band], DECAY * this.#last[band]);
      this.#tail[start + band] = this.#last[band];
      this.#mic[start + band] = mic[band];
    }
    this.#power[0][this.#time % SIZE] = micPower;
    this.#power[1][this.#time % SIZE] = playedPower;
    if (highest > PLAYED) {
      this.#played += 1;
      this.#heard = this.#time;
    }
    if (this.#time - this.#heard < DELAYS && !isUser) this.#correlate(mic, micMean); // silence teaches nothing
    this.#time += 1;
  }

  #correlate(mic, micMean) {
    const level = Float32Array.from(mic, (value, band) => Math.log(FLOOR + value) - micMean[band]);
    this.#micPower = MEMORY * this.#micPower + dot(level, 0, level);
    for (let delay = 0; delay < DELAYS; delay++) {
      const at = row(this.#time - delay);
      this.#products[delay] = MEMORY * this.#products[delay] + dot(this.#level, at, level);
      this.#playedPowers[delay] = MEMORY * this.#playedPowers[delay] + power(this.#level, at);
    }
  }

  /** Gains at the present delay; bands in which too little was played keep theirs. */
  #measure() {
    for (let band = 0; band < BANDS; band++) {
      let count = 0;
      for (let back = 1; back <= Math.min(KEPT, this.#time - this.#delay); back++) {
        const at = this.#time - back - this.#delay;
        const played = this.#tail[row(at) + band];
        const isDecay = played <= 1.001 * DECAY * this.#tail[row(at - 1) + band];
        if (played > MEASURED && !isDecay) this.#ratios[count++] = this.#mic[row(this.#time - back) + band] / played;
      }
      if (count >= MIN_MEASURED) this.#gains[band] = this.#ratios.subarray(0, count).sort()[count >> 1];
    }
  }

  get #guess() {
    return this.isCancelled ? CANCELLED : UNCANCELLED;
  }

  get #isVeryLoud() {
    if (this.#played >= LEARNING) return false;
    let loudest = 0;
    for (let delay = 0; delay <= DELAYS; delay += FRAMES) loudest = Math.max(loudest, this.#sum(1, delay));
    return this.#sum(0, 0) > this.#guess.veryLoud ** 2 * loudest;
  }

  /** Power of SPAN frames that end `delay` frames ago. */
  #sum(which, delay) {
    let sum = 0;
    for (let back = 1; back <= SPAN; back++) {
      const at = this.#time - delay - back;
      if (at >= 0) sum += this.#power[which][at % SIZE];
    }
    return sum;
  }
}

/** First value of a frame's row. Frames before the reset have rows of zeros. */
const row = (time) => ((time + SIZE) % SIZE) * BANDS;

function dot(a, at, b) {
  let sum = 0;
  for (let band = 0; band < BANDS; band++) sum += a[at + band] * b[band];
  return sum;
}

function power(a, at) {
  let sum = 0;
  for (let band = 0; band < BANDS; band++) sum += a[at + band] ** 2;
  return sum;
}
