/** Bands of a window's spectrum, of equal width on the ear's scale: what `background.js` and `echo.js` compare. */

const BINS = 129;
const EDGES = [3, 5, 7, 9, 11, 13, 16, 19, 23, 28, 34, 42, 52, 64, 80]; // bins of 62.5 Hz: 190 Hz to 5 kHz

export const FRAMES = 4; // of a window
export const FRAME_MS = 8;
export const BANDS = EDGES.length - 1;

/**
 * @param {Float32Array} spectrum [4, 129] magnitudes of `SpeechNetwork`
 * @param {Float32Array} out [4, 14] amplitudes
 */
export function bandAmplitudes(spectrum, out) {
  for (let frame = 0; frame < FRAMES; frame++) {
    for (let band = 0; band < BANDS; band++) {
      let sum = 0;
      for (let bin = EDGES[band]; bin < EDGES[band + 1]; bin++) sum += spectrum[frame * BINS + bin] ** 2;
      out[frame * BANDS + band] = Math.sqrt(sum);
    }
  }
  return out;
}
