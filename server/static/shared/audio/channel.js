/**
 * One source of a mix: its gain, and its loudness in LUFS, weighted as ITU-R BS.1770 does, over the last 0.7 s.
 */

const WINDOW = 32768; // samples, the longest that an analyser has
const OFFSET_LUFS = -0.691; // of the weighting
export const SILENT_LUFS = -70;

export class Channel {
  #context;
  #analyser = null;
  input;
  #gain;

  /** @param {AudioContext} context */
  constructor(context) {
    this.#context = context;
    this.input = this.#gain = new GainNode(context);
  }

  connect(node) {
    this.#gain.connect(node);
  }

  /** @param {number} db of the gain */
  set trim(db) {
    this.#gain.gain.value = 10 ** (db / 20);
  }

  /** Loudness after the gain, at least `SILENT_LUFS`. The first call starts the measurement. */
  get lufs() {
    this.#analyser ??= this.#measure();
    const samples = new Float32Array(WINDOW);
    this.#analyser.getFloatTimeDomainData(samples);
    return loudness(samples);
  }

  #measure() {
    const context = this.#context;
    const shelf = new BiquadFilterNode(context, { type: "highshelf", frequency: 1682, gain: 4 });
    const highpass = new BiquadFilterNode(context, { type: "highpass", frequency: 38, Q: -6 }); // Q in dB: 0.5
    const analyser = new AnalyserNode(context, { fftSize: WINDOW, channelCount: 1, channelCountMode: "explicit" });
    this.#gain.connect(shelf).connect(highpass).connect(analyser);
    return analyser;
  }

  close() {
    this.#gain.disconnect();
  }
}

/** Loudness of weighted samples in LUFS. */
export function loudness(samples) {
  const power = samples.reduce((sum, x) => sum + x * x, 0) / samples.length;
  return Math.max(SILENT_LUFS, OFFSET_LUFS + 10 * Math.log10(power + 1e-12));
}
