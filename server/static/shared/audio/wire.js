/** Encoding and decoding of binary frames, pcm16, float32 and base64 for the conversation's socket. */

const LENGTH_BYTES = 4; // uint32, little endian: length of the header in bytes
const PCM16_SCALE = 32768;
const CHARS_PER_CALL = 0x8000; // maximum number of arguments of String.fromCharCode

/**
 * Pack a binary frame: length of the header, header as JSON, sound, pictures.
 * @param {object} header @param {Uint8Array} sound @param {Uint8Array[]} pictures
 * @returns {ArrayBuffer}
 */
export function packFrame(header, sound, pictures = []) {
  const counted = { ...header, audio_bytes: sound.byteLength };
  if (pictures.length) counted.frame_bytes = pictures.map((picture) => picture.byteLength);
  const text = new TextEncoder().encode(JSON.stringify(counted));
  const parts = [text, sound, ...pictures];
  const frame = new Uint8Array(LENGTH_BYTES + parts.reduce((sum, part) => sum + part.byteLength, 0));
  new DataView(frame.buffer).setUint32(0, text.byteLength, true);
  let at = LENGTH_BYTES;
  for (const part of parts) {
    frame.set(part, at);
    at += part.byteLength;
  }
  return frame.buffer;
}

/**
 * Unpack a binary frame.
 * @param {ArrayBuffer} buffer
 * @returns {{header: object, sound: Uint8Array, pictures: Uint8Array[]}} views into the buffer
 * @throws {RangeError} if a length does not match the buffer
 */
export function unpackFrame(buffer) {
  if (buffer.byteLength < LENGTH_BYTES) {
    throw new RangeError(`binary frame: expected at least ${LENGTH_BYTES} bytes, got ${buffer.byteLength}`);
  }
  const headerBytes = new DataView(buffer).getUint32(0, true);
  let at = LENGTH_BYTES + headerBytes;
  if (at > buffer.byteLength) {
    throw new RangeError(`binary frame's header: expected at most ${buffer.byteLength} bytes, got ${headerBytes}`);
  }
  const text = new TextDecoder().decode(new Uint8Array(buffer, LENGTH_BYTES, headerBytes));
  const { audio_bytes: soundBytes = 0, frame_bytes: pictureBytes = [], ...header } = JSON.parse(text);
  const views = [soundBytes, ...pictureBytes].map((count) => {
    if (at + count > buffer.byteLength) {
      throw new RangeError(`binary frame: expected ${at + count} bytes or more, got ${buffer.byteLength}`);
    }
    const view = new Uint8Array(buffer, at, count);
    at += count;
    return view;
  });
  if (at !== buffer.byteLength) throw new RangeError(`binary frame: expected ${at} bytes, got ${buffer.byteLength}`);
  return { header, sound: views[0], pictures: views.slice(1) };
}

/** Samples in [-1, 1] to little-endian int16; NaN becomes 0. */
export function toPcm16(samples) {
  const bytes = new Uint8Array(2 * samples.length);
  const view = new DataView(bytes.buffer);
  for (let i = 0; i < samples.length; i++) {
    const scaled = Math.round(PCM16_SCALE * samples[i]) || 0;
    view.setInt16(2 * i, Math.max(-PCM16_SCALE, Math.min(PCM16_SCALE - 1, scaled)), true);
  }
  return bytes;
}

/** @param {Uint8Array} bytes little-endian int16 @returns {Float32Array} */
export function fromPcm16(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const samples = new Float32Array(bytes.byteLength >> 1);
  for (let i = 0; i < samples.length; i++) samples[i] = view.getInt16(2 * i, true) / PCM16_SCALE;
  return samples;
}

/** @param {Uint8Array} bytes little-endian float32, at any offset @returns {Float32Array} */
export function fromFloat32(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const samples = new Float32Array(bytes.byteLength >> 2);
  for (let i = 0; i < samples.length; i++) samples[i] = view.getFloat32(4 * i, true);
  return samples;
}

/** Samples to little-endian float32 on any platform. */
export function toFloat32(samples) {
  const view = new DataView(new ArrayBuffer(4 * samples.length));
  for (let i = 0; i < samples.length; i++) view.setFloat32(4 * i, samples[i], true);
  return new Uint8Array(view.buffer);
}

export function toBase64(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += CHARS_PER_CALL) {
    text += String.fromCharCode(...bytes.subarray(at, at + CHARS_PER_CALL));
  }
  return btoa(text);
}

export function fromBase64(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

/** Samples as base64 float32, the form of `ref_audio_base64`. */
export const soundText = (samples) => toBase64(toFloat32(samples));

/**
 * Encode an `audio_chunk` message.
 * @param {object} fields of the message besides sound and pictures
 * @param {Float32Array} samples 16 kHz @param {Uint8Array[]} pictures JPEG
 * @param {"base64"|"pcm16"|"float32"} form @returns {string|ArrayBuffer}
 */
export function encodeChunk(fields, samples, pictures, form) {
  const header = { type: "audio_chunk", ...fields };
  if (form === "pcm16") return packFrame(header, toPcm16(samples), pictures);
  if (form === "float32") return packFrame(header, toFloat32(samples), pictures);
  const message = { ...header, audio_base64: soundText(samples) };
  if (pictures.length) message.frame_base64_list = pictures.map(toBase64);
  return JSON.stringify(message);
}

/**
 * Decode a message from the server. Its sound at 24 kHz is in `sound`, or null.
 * @param {string|ArrayBuffer} data @param {"base64"|"pcm16"|"float32"} form
 */
export function decodeMessage(data, form) {
  if (typeof data === "string") {
    const { audio_data: text, ...message } = JSON.parse(data);
    return { ...message, sound: text ? fromFloat32(fromBase64(text)) : null };
  }
  const { header, sound } = unpackFrame(data);
  const samples = form === "pcm16" ? fromPcm16(sound) : fromFloat32(sound);
  return { ...header, sound: samples.length ? samples : null };
}
