/** The WebSocket of a conversation: queue, prepare, units and the server's messages. */

import { decodeMessage, encodeChunk } from "../../shared/audio/wire.js";

export const REQUESTED_SPEC = { version: 1, partial_results: true, sound_in: "pcm16", sound_out: "pcm16" };
const PLAIN_SPEC = { version: 1, partial_results: false, sound_in: "base64", sound_out: "base64" };
const STOP_TIMEOUT_MS = 1500; // for the server's `stopped`, before the page closes the socket
const OPEN_TIMEOUT_MS = 15000;
const STOPPED = /"type":\s*"stopped"/;

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
  #isClosed = false;
  #isStopping = false;
  #isPrepared = false;
  spec = PLAIN_SPEC;
  id;

  /**
   * @param {string} id @param {object} prepare fields of the message besides `spec`
   * @param {object} on called by message type; also "open", "unreadable" with the Error for a message
   *   that cannot be parsed, and "closed" with {code, reason, opened}, once
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
    this.#timer = setTimeout(() => this.#close({ code: 1006, reason: "", opened }), OPEN_TIMEOUT_MS);
  }

  #take(data) {
    if (this.#isClosed) return;
    if (this.#isStopping) {
      // What the server sent before it read `stop` is ignored.
      if (typeof data === "string" && STOPPED.test(data)) this.close();
      return;
    }
    let message;
    try {
      message = decodeMessage(data, this.spec.sound_out);
    } catch (error) {
      this.#on.unreadable?.(error);
      return;
    }
    if (message.type === "queue_done") {
      this.send({ type: "prepare", ...this.#prepare, spec: REQUESTED_SPEC });
    } else if (message.type === "prepared") {
      this.#isPrepared = true;
      this.spec = { ...PLAIN_SPEC, ...message.spec };
    }
    const deliver = () => this.#isStopping || this.#isClosed || this.#on[message.type]?.(message);
    // Units begin with `prepared`; the server spreads those of its sessions over the second.
    if (message.type === "prepared" && message.start_after_ms > 0) setTimeout(deliver, message.start_after_ms);
    else deliver();
  }

  /** @param {object} message sent as JSON; dropped if the connection is not open */
  send(message) {
    if (this.#socket.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(message));
  }

  /** Send one second of sound at 16 kHz and its pictures. @returns {boolean} whether the connection is open */
  sendUnit(samples, pictures, fields) {
    if (this.#socket.readyState !== WebSocket.OPEN) return false;
    this.#socket.send(encodeChunk(fields, samples, pictures, this.spec.sound_in));
    return true;
  }

  report(event, fields) {
    this.send({ type: "client_diagnostic", event, session_id: this.id, ...fields });
  }

  /** Send `stop`, and close after the server's `stopped` or a timeout. No handler is called any more. */
  stop() {
    this.#isStopping = true;
    clearTimeout(this.#timer);
    if (!this.#isPrepared) {
      this.close(); // leaves the queue at once
      return;
    }
    this.send({ type: "stop" });
    this.#timer = setTimeout(() => this.close(), STOP_TIMEOUT_MS);
  }

  /** Close the socket. No handler is called any more. */
  close() {
    this.#isStopping = true;
    this.#close({ code: 1000, reason: "", opened: true });
  }

  #close(event) {
    clearTimeout(this.#timer);
    if (this.#isClosed) return;
    this.#isClosed = true;
    this.#socket.close();
    if (!this.#isStopping) this.#on.closed?.(event);
  }
}
