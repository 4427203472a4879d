/** Frames that are louder than the background, which is the tenth percentile of each band over the last 1.5 s. */

import { BANDS, FRAMES } from "./bands.js";

const KEPT = 190; // frames
const RANK = 0.1;
const LOUD = 2.8; // times the background: 9 dB
const LOUD_BANDS = 3; // that are louder in a loud frame
const STRONG = 10; // times the background: 20 dB
const SILENCE = 1e-3; // amplitude added to both

export class Background {
  #history = Array.from({ length: BANDS }, () => new Float32Array(KEPT));
  #sorted = new Float32Array(KEPT);
  #floor = new Float32Array(BANDS);
  #frames = 0; // since the reset
  loud = new Uint8Array(FRAMES);
  isStrong = false; // a frame of the window is far above the background

  reset() {
    this.#frames = 0;
  }

  /** @param {Float32Array} levels [4, 14] amplitudes of the next window */
  add(levels) {
    for (let frame = 0; frame < FRAMES; frame++, this.#frames++) {
      for (let band = 0; band < BANDS; band++) {
        this.#history[band][this.#frames % KEPT] = SILENCE + levels[frame * BANDS + band];
      }
    }
    const kept = Math.min(KEPT, this.#frames);
    const sorted = this.#sorted.subarray(0, kept);
    for (let band = 0; band < BANDS; band++) {
      sorted.set(this.#history[band].subarray(0, kept));
      this.#floor[band] = sorted.sort()[Math.floor(RANK * kept)];
    }
    this.isStrong = false;
    for (let frame = 0; frame < FRAMES; frame++) {
      const row = levels.subarray(frame * BANDS, (frame + 1) * BANDS);
      this.loud[frame] = this.#exceeds(row, LOUD) ? 1 : 0;
      this.isStrong ||= this.#exceeds(row, STRONG);
    }
  }

  #exceeds(row, factor) {
    let bands = 0;
    for (let band = 0; band < BANDS; band++) bands += SILENCE + row[band] > factor * this.#floor[band] ? 1 : 0;
    return bands >= LOUD_BANDS;
  }
}
