/** Ids of sessions, addresses of sockets, and what a place in the queue means. */

import { t } from "./i18n.js";

/** A prefix such as `hdx_` and 16 hexadecimal digits. */
export function newSessionId(prefix) {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return prefix + Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** The WebSocket address of a path on this server. */
export function socketUrl(path) {
  const url = new URL(path, location.href);
  url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  return url;
}

/** A sentence for `queued` and `queue_update`. Its texts are in `texts/character.js`. */
export function queueText({ reason, progress, position, queue_length: length, estimated_wait_s: seconds }) {
  if (reason === "no_worker") return t("queue_no_worker");
  if (reason === "loading") return t("queue_loading", { what: progress?.what ?? "" });
  return t("queue_place", { position, length, seconds: Math.round(seconds) });
}
