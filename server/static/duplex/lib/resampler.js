/**
 * Streaming sample rate conversion: a polyphase windowed sinc filter.
 *
 * Positions are integers, so that rounding errors do not accumulate over an hour of blocks.
 */

// Zero crossings of the sinc on each side: 80 dB attenuation and a transition band of 10 % of the lower rate.
const ZEROS = 20;
const KAISER_BETA = 8;
const PASS = 0.92; // pass band, relative to half the lower rate

const gcd = (a, b) => (b ? gcd(b, a % b) : a);

/** Modified Bessel function of order 0, from its series. */
function bessel(x) {
  let sum = 1;
  for (let term = 1, k = 1; term > 1e-10 * sum; k++) {
    term *= (x / (2 * k)) ** 2;
    sum += term;
  }
  return sum;
}

export class Resampler {
  /** @param {number} from Hz @param {number} to Hz */
  constructor(from, to) {
    const common = gcd(Math.round(from), Math.round(to));
    this.up = Math.round(to) / common;
    this.down = Math.round(from) / common;
    const wide = Math.max(1, this.down / this.up);
    const half = Math.ceil(ZEROS * wide);
    this.taps = 2 * half;
    this.table = new Float32Array(this.up * this.taps);
    this.#design(half, PASS / wide);
    this.held = new Float32Array(0);
    this.reset();
  }

  #design(half, cutoff) {
    for (let phase = 0; phase < this.up; phase++) {
      const row = this.table.subarray(phase * this.taps, (phase + 1) * this.taps);
      let sum = 0;
      for (let tap = 0; tap < this.taps; tap++) {
        const at = tap - (half - 1) - phase / this.up;
        const x = Math.PI * cutoff * at;
        const window = bessel(KAISER_BETA * Math.sqrt(Math.max(0, 1 - (at / half) ** 2))) / bessel(KAISER_BETA);
        row[tap] = (x ? Math.sin(x) / x : 1) * window;
        sum += row[tap];
      }
      for (let tap = 0; tap < this.taps; tap++) row[tap] /= sum;
    }
  }

  /** Clear the history. The next output sample is aligned with the next input sample. */
  reset() {
    this.phase = 0;
    this.held = new Float32Array(this.taps / 2 - 1);
  }

  /** @param {Float32Array} input @returns {Float32Array} all samples that can be computed so far */
  process(input) {
    const { up, down, taps, table } = this;
    const all = new Float32Array(this.held.length + input.length);
    all.set(this.held);
    all.set(input, this.held.length);
    const out = new Float32Array(Math.max(0, Math.ceil(((all.length - taps + 1) * up - this.phase) / down)));
    let start = 0;
    let phase = this.phase;
    for (let i = 0; i < out.length; i++) {
      const row = phase * taps;
      let sum = 0;
      for (let tap = 0; tap < taps; tap++) sum += all[start + tap] * table[row + tap];
      out[i] = sum;
      phase += down;
      start += Math.floor(phase / up);
      phase %= up;
    }
    this.phase = phase;
    this.held = all.slice(start);
    return out;
  }
}
