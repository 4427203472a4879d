/** Peaks of a WAV file, read while it arrives: the samples of an hour are never in memory at once. */

export const PEAKS_PER_S = 25;
const FULL_SCALE = 32768;
const NAME_BYTES = 4;
const CHUNK_HEADER = 8;
const RIFF_HEADER = 12;

/**
 * Read a stereo 16-bit WAV file.
 * @param {ReadableStream<Uint8Array>} stream
 * @param {(peaks: Peaks) => void} onProgress called after each part
 * @returns {Promise<Peaks>} @throws {RangeError} for another format
 */
export async function readPeaks(stream, onProgress = () => {}) {
  const reader = stream.getReader();
  let bytes = new Uint8Array(0);
  let peaks = null;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    bytes = joined(bytes, value);
    if (!peaks) {
      const format = readHeader(bytes);
      if (!format) continue;
      peaks = new Peaks(format);
      bytes = bytes.slice(format.at);
    }
    bytes = bytes.slice(peaks.add(bytes));
    onProgress(peaks);
  }
  if (!peaks) throw new RangeError("WAV file: expected a header, got less");
  return peaks;
}

/** Peaks of both channels. channels: two lists of 0 to 1, one value for each part of 1 / PEAKS_PER_S seconds. */
export class Peaks {
  channels = [[], []];
  #frames = 0;
  #perPeak;
  #nFrames;

  constructor({ rate, nBytes }) {
    this.rate = rate;
    this.#perPeak = Math.round(rate / PEAKS_PER_S);
    this.#nFrames = nBytes / 4;
  }

  /** Length of the whole file. */
  get seconds() {
    return this.#nFrames / this.rate;
  }

  /** Add samples. @param {Uint8Array} bytes @returns {number} of bytes that were read, all but an incomplete frame */
  add(bytes) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    const n = Math.min(bytes.length >> 2, this.#nFrames - this.#frames);
    for (let i = 0; i < n; i++, this.#frames++) {
      const at = Math.floor(this.#frames / this.#perPeak);
      for (let channel = 0; channel < 2; channel++) {
        const level = Math.abs(view.getInt16(4 * i + 2 * channel, true)) / FULL_SCALE;
        const peaks = this.channels[channel];
        if (at >= peaks.length) peaks.push(level);
        else if (level > peaks[at]) peaks[at] = level;
      }
    }
    return 4 * n;
  }
}

/** @returns {{rate: number, nBytes: number, at: number}|null} null: the header is not complete yet. at: of the samples */
function readHeader(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  let rate = 0;
  for (let at = RIFF_HEADER; at + CHUNK_HEADER <= bytes.length; ) {
    const name = String.fromCharCode(...bytes.subarray(at, at + NAME_BYTES));
    const nBytes = view.getUint32(at + NAME_BYTES, true);
    const body = at + CHUNK_HEADER;
    if (name === "data") return { rate, nBytes, at: body };
    if (body + nBytes > bytes.length) return null;
    if (name === "fmt ") {
      const [channels, bits] = [view.getUint16(body + 2, true), view.getUint16(body + 14, true)];
      if (channels !== 2 || bits !== 16) throw new RangeError(`WAV file: expected 2 channels of 16 bits, got ${channels} of ${bits}`);
      rate = view.getUint32(body + 4, true);
    }
    at = body + nBytes + (nBytes % 2);
  }
  return null;
}

function joined(first, second) {
  if (!first.length) return second;
  const both = new Uint8Array(first.length + second.length);
  both.set(first);
  both.set(second, first.length);
  return both;
}
