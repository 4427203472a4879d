/** The request of a chat: the conversation and the settings as one message. */

import { itemOf } from "./attachments.js";

const MAX_BYTES = 128 * 2 ** 20;

/** The settings of a chat, as data for `Fields`. */
export const CHAT_SETTINGS = [
  { key: "max_new_tokens", kind: "number", min: 1, max: 4096, step: 1, usual: 1024 },
  { key: "length_penalty", kind: "number", min: 0.1, max: 5, step: 0.05, usual: 1.1 },
  { key: "do_sample", kind: "switch", usual: true },
  { key: "temperature", kind: "number", min: 0, max: 2, step: 0.05, usual: 0.7 },
  { key: "top_p", kind: "number", min: 0, max: 1, step: 0.01, usual: 0.8 },
  { key: "top_k", kind: "number", min: 0, max: 2147483647, step: 1, usual: 100 },
  { key: "max_slice_nums", kind: "number", min: 1, max: 16, step: 1, usual: null },
  { key: "stack_frames", kind: "number", min: 1, max: 10, step: 1, usual: 1 },
  { key: "tts_temperature", kind: "number", min: 0.001, max: 2, step: "any", usual: null },
];
const MAX_NEW_TOKENS = 1024;

/**
 * @param {object[]} messages of the conversation: {role, text, attachments}
 * @param {object[]} system items of the system message
 * @param {object} settings streaming, spoken, thinking, detailed, and `chat`: values of `CHAT_SETTINGS`
 * @param {string|null} voice base64 of the voice
 * @returns {Promise<string>} @throws {RangeError} if it is larger than the server accepts
 */
export async function requestText(messages, system, settings, voice) {
  const { max_slice_nums: slices, stack_frames: stackFrames = 1, tts_temperature: ttsTemperature, ...generation } = settings.chat;
  const own = await Promise.all(messages.map(async ({ role, text, attachments = [] }) => {
    const items = await Promise.all(attachments.map((one) => itemOf(one, stackFrames)));
    return { role, content: text ? [...items, { type: "text", text }] : items };
  }));
  const maxSlices = slices ?? (settings.detailed ? null : 1);
  const tts = { enabled: true, ...(voice && { ref_audio_data: voice }), ...(ttsTemperature && { sampling: { temperature: ttsTemperature } }) };
  const text = JSON.stringify({
    messages: [...(system.length ? [{ role: "system", content: system }] : []), ...own],
    streaming: settings.streaming,
    generation: { max_new_tokens: MAX_NEW_TOKENS, ...generation },
    ...(settings.spoken && { tts, use_tts_template: true }),
    ...(maxSlices && { image: { max_slice_nums: maxSlices } }),
    ...(settings.thinking && { enable_thinking: true }),
  });
  if (text.length > MAX_BYTES) throw new RangeError("request");
  return text;
}
