/** WAV files of samples. */

import { toPcm16 } from "./wire.js";

const HEADER_BYTES = 44;
const PCM = 1;
const BITS = 16;

/** @param {Float32Array[]} blocks mono samples in [-1, 1] @param {number} rate Hz @returns {Blob} 16 bit */
export const wavOf = (blocks, rate) => wavOfPcm16(blocks.map(toPcm16), rate, 1);

/** @param {Uint8Array[]} sound pcm16, samples of the channels alternate @param {number} rate Hz @returns {Blob} */
export function wavOfPcm16(sound, rate, channels) {
  const bytes = sound.reduce((sum, one) => sum + one.byteLength, 0);
  const view = new DataView(new ArrayBuffer(HEADER_BYTES));
  const text = (at, name) => [...name].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, HEADER_BYTES - 8 + bytes, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // bytes of the format
  view.setUint16(20, PCM, true);
  view.setUint16(22, channels, true);
  view.setUint32(24, rate, true);
  view.setUint32(28, (channels * rate * BITS) / 8, true);
  view.setUint16(32, (channels * BITS) / 8, true);
  view.setUint16(34, BITS, true);
  text(36, "data");
  view.setUint32(40, bytes, true);
  return new Blob([view, ...sound], { type: "audio/wav" });
}
