/**
 * Probability that a window of sound contains speech: silero-vad's network for 16 kHz.
 *
 * Short-time Fourier transform as a convolution, four convolutions, a recurrent layer, one output. Thresholds and
 * durations are in `onset.js`.
 */

export const RATE = 16000;
export const WINDOW = 512;
const CONTEXT = 64; // samples before the window that are part of the network's input
const PAD = 64; // samples after the window, mirrored
const FFT = 256;
const HOP = 128;
const BINS = FFT / 2 + 1;
const FRAMES = 4;
const WIDTH = 128; // of the recurrent layer
// The arrays of `/api/vad/weights` in their order, and their numbers of values.
const SIZES = {
  stft: 2 * BINS * FFT,
  conv1: 128 * BINS * 3, bias1: 128,
  conv2: 64 * 128 * 3, bias2: 64,
  conv3: 64 * 64 * 3, bias3: 64,
  conv4: 128 * 64 * 3, bias4: 128,
  fromInput: 4 * WIDTH * WIDTH, fromHidden: 4 * WIDTH * WIDTH,
  biasInput: 4 * WIDTH, biasHidden: 4 * WIDTH,
  output: WIDTH, biasOutput: 1,
};

/** @param {ArrayBuffer} buffer float32 @returns {Object<string, Float32Array>} @throws {RangeError} */
export function readWeights(buffer) {
  const expected = 4 * Object.values(SIZES).reduce((sum, size) => sum + size, 0);
  if (buffer.byteLength !== expected) {
    throw new RangeError(`speech network: expected ${expected} bytes, got ${buffer.byteLength}`);
  }
  let at = 0;
  return Object.fromEntries(Object.entries(SIZES).map(([name, size]) => {
    const array = new Float32Array(buffer, at, size);
    at += 4 * size;
    return [name, array];
  }));
}

/** A convolution of width 3 with one frame of zeros on both sides, and a rectifier. Frames are rows. */
class Convolution {
  #weights; // [3][outputs][inputs]: the innermost sum runs over neighbours in memory
  #bias;
  #inputs;
  #stride;
  output;

  constructor(weights, bias, frames, stride) {
    const outputs = bias.length;
    const inputs = weights.length / outputs / 3;
    this.#weights = new Float32Array(weights.length);
    for (let row = 0; row < outputs * inputs; row++) {
      for (let tap = 0; tap < 3; tap++) this.#weights[tap * outputs * inputs + row] = weights[3 * row + tap];
    }
    this.#bias = bias;
    this.#inputs = inputs;
    this.#stride = stride;
    this.output = new Float32Array(outputs * Math.ceil(frames / stride));
  }

  /** @param {Float32Array} input [frames, inputs] @returns {Float32Array} [frames / stride, outputs] */
  run(input) {
    const n = this.#inputs;
    const frames = input.length / n;
    const outputs = this.#bias.length;
    for (let to = 0, at = 0; at < frames; to++, at += this.#stride) {
      for (let out = 0; out < outputs; out++) {
        let sum = this.#bias[out];
        for (let tap = Math.max(0, 1 - at); tap < Math.min(3, frames + 1 - at); tap++) {
          sum += dot(this.#weights, (tap * outputs + out) * n, input, (at + tap - 1) * n, n);
        }
        this.output[to * outputs + out] = Math.max(0, sum);
      }
    }
    return this.output;
  }
}

function dot(a, atA, b, atB, n) {
  let sum = 0;
  for (let i = 0; i < n; i++) sum += a[atA + i] * b[atB + i];
  return sum;
}

const sigmoid = (x) => 1 / (1 + Math.exp(-x));

export class SpeechNetwork {
  #weights;
  #layers;
  #input = new Float32Array(CONTEXT + WINDOW + PAD);
  #hidden = new Float32Array(WIDTH);
  #cell = new Float32Array(WIDTH);
  #gates = new Float32Array(4 * WIDTH);
  spectrum = new Float32Array(FRAMES * BINS); // magnitudes of the last window, [frame, bin]

  /** @param {Object<string, Float32Array>} weights of `readWeights` */
  constructor(weights) {
    this.#weights = weights;
    const layer = (n, frames, stride) => new Convolution(weights[`conv${n}`], weights[`bias${n}`], frames, stride);
    this.#layers = [layer(1, FRAMES, 1), layer(2, FRAMES, 2), layer(3, 2, 2), layer(4, 1, 1)];
  }

  /** Forget what was heard. */
  reset() {
    this.#input.fill(0);
    this.#hidden.fill(0);
    this.#cell.fill(0);
  }

  /** @param {Float32Array} sound the next 512 samples at 16 kHz @returns {number} from 0 to 1 */
  probability(sound) {
    let values = this.transform(sound);
    for (const layer of this.#layers) values = layer.run(values);
    this.#remember(values);
    let sum = this.#weights.biasOutput[0];
    for (let i = 0; i < WIDTH; i++) sum += this.#weights.output[i] * Math.max(0, this.#hidden[i]);
    return sigmoid(sum);
  }

  /** Only the magnitudes of the next window, [frame, bin]; valid until the next call. */
  transform(sound) {
    const input = this.#input;
    const end = CONTEXT + WINDOW;
    input.copyWithin(0, WINDOW, end);
    input.set(sound, CONTEXT);
    for (let i = 0; i < PAD; i++) input[end + i] = input[end - 2 - i];
    const kernels = this.#weights.stft;
    for (let frame = 0; frame < FRAMES; frame++) {
      for (let bin = 0; bin < BINS; bin++) {
        const real = dot(kernels, bin * FFT, input, frame * HOP, FFT);
        const imaginary = dot(kernels, (BINS + bin) * FFT, input, frame * HOP, FFT);
        this.spectrum[frame * BINS + bin] = Math.sqrt(real * real + imaginary * imaginary);
      }
    }
    return this.spectrum;
  }

  /** The recurrent layer (LSTM; gates in the order input, forget, cell, output). */
  #remember(values) {
    const weights = this.#weights;
    const gates = this.#gates;
    for (let i = 0; i < 4 * WIDTH; i++) {
      gates[i] = weights.biasInput[i] + weights.biasHidden[i]
        + dot(weights.fromInput, i * WIDTH, values, 0, WIDTH)
        + dot(weights.fromHidden, i * WIDTH, this.#hidden, 0, WIDTH);
    }
    for (let i = 0; i < WIDTH; i++) {
      const added = sigmoid(gates[i]) * Math.tanh(gates[2 * WIDTH + i]);
      this.#cell[i] = sigmoid(gates[WIDTH + i]) * this.#cell[i] + added;
      this.#hidden[i] = sigmoid(gates[3 * WIDTH + i]) * Math.tanh(this.#cell[i]);
    }
  }
}
