/**
 * Reference voices: from the server's presets, from a file or from the microphone.
 *
 * A voice is mono, 16 kHz, at most 20 s. The user's own voice is stored in localStorage as pcm16.
 */

import { fetchJson } from "../api.js";
import { fromBase64, fromPcm16, soundText, toBase64, toPcm16 } from "./wire.js";

const RATE = 16000;
const MAX_S = 20;
const RECORD_MS = 5000;
const KEY = "duologue_voice";

/** The presets of a mode. @returns {Promise<object[]>} empty if the server has none */
export async function fetchPresets(mode) {
  try {
    return (await fetchJson("/api/presets"))[mode] ?? [];
  } catch {
    return [];
  }
}

/** Voice of a preset as base64 float32; null if it has none. */
export async function presetVoice(mode, id) {
  const { ref_audio: voice } = await fetchJson(`/api/presets/${mode}/${encodeURIComponent(id)}/audio`);
  return voice?.data ?? null;
}

/** The server's default voice as base64 float32. */
export async function defaultVoice() {
  return (await fetchJson("/api/default_ref_audio")).base64;
}

/** @param {Blob} file any sound the browser can decode @returns {Promise<Float32Array>} @throws {DOMException} */
export async function decodeVoice(file) {
  const context = new OfflineAudioContext(1, RATE, RATE);
  const sound = await context.decodeAudioData(await file.arrayBuffer()); // resamples to the context's rate
  const mono = new Float32Array(Math.min(sound.length, MAX_S * RATE));
  for (let channel = 0; channel < sound.numberOfChannels; channel++) {
    const samples = sound.getChannelData(channel);
    for (let i = 0; i < mono.length; i++) mono[i] += samples[i] / sound.numberOfChannels;
  }
  return mono;
}

/** Record five seconds. tick(remaining seconds) is called every second. @returns {Promise<Blob>} */
export async function recordVoice(stream, tick) {
  const recorder = new MediaRecorder(stream);
  const parts = [];
  recorder.ondataavailable = ({ data }) => parts.push(data);
  const over = new Promise((resolve) => (recorder.onstop = resolve));
  recorder.start();
  let left = RECORD_MS / 1000;
  tick(left);
  const ticking = setInterval(() => tick(--left), 1000);
  setTimeout(() => recorder.stop(), RECORD_MS);
  await over;
  clearInterval(ticking);
  for (const track of stream.getTracks()) track.stop();
  return new Blob(parts, { type: recorder.mimeType });
}

export function keepOwnVoice(name, samples) {
  const kept = { name, duration: samples.length / RATE, pcm16: toBase64(toPcm16(samples)) };
  localStorage.setItem(KEY, JSON.stringify(kept));
  return kept;
}

/** @returns {{name: string, duration: number, pcm16: string}|null} */
export function ownVoice() {
  try {
    return JSON.parse(localStorage.getItem(KEY));
  } catch {
    return null;
  }
}

/** @param {{pcm16: string}} kept @returns {string} in the form of `prepare` */
export const voiceText = (kept) => soundText(fromPcm16(fromBase64(kept.pcm16)));

/** Play base64 float32 at 16 kHz. */
export async function playVoice(text) {
  const bytes = fromBase64(text);
  const samples = new Float32Array(bytes.buffer, 0, bytes.length >> 2);
  const context = new AudioContext();
  const buffer = context.createBuffer(1, samples.length, RATE);
  buffer.copyToChannel(samples, 0);
  const source = new AudioBufferSourceNode(context, { buffer });
  source.connect(context.destination);
  source.onended = () => context.close();
  source.start();
}
