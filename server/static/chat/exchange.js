/** Chats as JSON files: written by the page, and read from it or from requests in the form of the server's API. */

import { fromBase64, toBase64 } from "../shared/audio/wire.js";
import { t } from "../shared/i18n.js";

const FORMAT = "duologue-chat";
const USUAL_TYPES = { image: "image/jpeg", audio: "audio/wav", video: "video/mp4" };
const ROLES = ["system", "user", "assistant"];

const textOf = async (blob) => toBase64(new Uint8Array(await blob.arrayBuffer()));

/**
 * @param {object[]} messages of the conversation @param {object[]|null} system items of the system message, if the user
 *   edits them one by one
 * @returns {Promise<Blob>}
 */
export async function exported(messages, system) {
  const list = await Promise.all(messages.map(async ({ role, text, attachments = [], sound, stopped, error }) => ({
    role,
    content: [
      ...(await Promise.all(attachments.map(async ({ kind, name, blob }) => ({ type: kind, name, mime: blob.type, data: await textOf(blob) })))),
      ...(text ? [{ type: "text", text }] : []),
    ],
    ...(sound && { speech_wav: await textOf(sound) }), ...(stopped && { stopped }), ...(error && { error }),
  })));
  const body = { format: FORMAT, version: 1, ...(system && { system }), messages: list };
  return new Blob([JSON.stringify(body, null, 1)], { type: "application/json" });
}

/**
 * @param {string} text of a file: a chat of this page, a request, or a list of messages
 * @returns {{messages: object[], system: object[]|null}} @throws {Error} with a sentence for the user
 */
export function imported(text) {
  try {
    const body = JSON.parse(text);
    const list = Array.isArray(body) ? body : body.messages;
    const own = list.filter(({ role }) => role !== "system");
    const prompt = list.find(({ role }) => role === "system");
    if (!list.every(({ role }) => ROLES.includes(role))) throw new Error("role");
    const system = body.system ?? (prompt ? itemsOf(prompt.content) : null);
    return { messages: own.map(messageOf), system: system && system.map(systemItemOf) };
  } catch {
    throw new Error(t("import_bad"));
  }
}

const itemsOf = (content) => (typeof content === "string" ? [{ type: "text", text: content }] : content);

/** A message of the page. */
function messageOf({ role, content, speech_wav: speech, stopped, error }) {
  const items = itemsOf(content);
  const media = items.filter(({ type }) => type !== "text");
  return {
    role,
    text: items.filter(({ type }) => type === "text").map((item) => String(item.text)).join("\n"),
    attachments: media.map(attachmentOf),
    ...(speech && { sound: blobOf(speech, "audio/wav") }), ...(stopped && { stopped: String(stopped) }),
    ...(error && { error: String(error) }),
  };
}

function attachmentOf({ type, name, mime = "", data }) {
  if (!(type in USUAL_TYPES)) throw new Error("type");
  return { kind: type, name: String(name ?? type), blob: blobOf(data, mime.startsWith(`${type}/`) ? mime : USUAL_TYPES[type]) };
}

function systemItemOf({ type, text, name, data }) {
  if (type === "text") return { type, text: String(text) };
  if (!["audio", "image"].includes(type)) throw new Error("type");
  return { type, name: String(name ?? type), data: toBase64(fromBase64(data)) };
}

const blobOf = (data, type) => new Blob([fromBase64(data.replace(/^data:[^,]*,/, ""))], { type });
