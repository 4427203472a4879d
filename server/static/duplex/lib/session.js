/**
 * The conversation's socket from opening to close: queue, prepare, units, and what the server says.
 *
 * Knows the messages and the options agreed on. Does not know sound devices, pictures' source or the page.
 */

import { decodeMessage, encodeChunk } from "./wire.js";

export const WISHES = { version: 1, partial_results: true, sound_in: "pcm16", sound_out: "pcm16" };
const PLAIN = { version: 1, partial_results: false, sound_in: "base64", sound_out: "base64" };
const GOODBYE_MS = 1500; // for `stopped`, before the page closes by itself
const OPENING_MS = 15000;

/** `omni_` or `adx_` and 16 hexadecimal digits. */
export function newSessionId(prefix) {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return prefix + Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function socketUrl(sessionId) {
  const url = new URL(`/ws/duplex/${sessionId}`, location.href);
  url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  return url;
}

export class Session {
  #socket;
  #prepare;
  #on;
  #timer = 0;
  #over = false;
  spec = PLAIN;
  id;

  /**
   * @param {string} id @param {object} prepare fields of the message besides `spec`
   * @param {object} on called by message type; also "open", "unreadable" with an Error for what is no message, and
   *   "closed" with {code, reason, opened}, once
   */
  constructor(id, prepare, on) {
    this.id = id;
    this.#prepare = prepare;
    this.#on = on;
    let opened = false;
    this.#socket = new WebSocket(socketUrl(id));
    this.#socket.binaryType = "arraybuffer";
    this.#socket.onopen = () => {
      opened = true;
      clearTimeout(this.#timer);
      on.open?.();
    };
    this.#socket.onmessage = ({ data }) => this.#take(data);
    this.#socket.onclose = ({ code, reason }) => this.#close({ code, reason, opened });
    this.#timer = setTimeout(() => this.#close({ code: 1006, reason: "", opened }), OPENING_MS);
  }

  #take(data) {
    if (this.#over) return;
    let message;
    try {
      message = decodeMessage(data, this.spec.sound_out);
    } catch (error) {
      this.#on.unreadable?.(error);
      return;
    }
    if (message.type === "queue_done") {
      this.send({ type: "prepare", ...this.#prepare, spec: WISHES });
    } else if (message.type === "prepared") {
      this.spec = { ...PLAIN, ...message.spec };
    }
    this.#on[message.type]?.(message);
  }

  /** @param {object} message sent as JSON; lost where the connection is not open */
  send(message) {
    if (this.#socket.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(message));
  }

  /** One second of sound, 16 kHz, and its pictures. */
  sendUnit(samples, pictures, fields) {
    if (this.#socket.readyState !== WebSocket.OPEN) return false;
    this.#socket.send(encodeChunk(fields, samples, pictures, this.spec.sound_in));
    return true;
  }

  report(event, fields) {
    this.send({ type: "client_diagnostic", event, session_id: this.id, ...fields });
  }

  /** Say goodbye and close, after `stopped` or a moment. */
  stop() {
    this.send({ type: "stop" });
    this.#timer = setTimeout(() => this.close(), GOODBYE_MS);
  }

  close() {
    this.#close({ code: 1000, reason: "", opened: true });
  }

  #close(event) {
    clearTimeout(this.#timer);
    if (this.#over) return;
    this.#over = true;
    this.#socket.close();
    this.#on.closed?.(event);
  }
}
