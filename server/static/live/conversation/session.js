/** The WebSocket of a conversation: queue, prepare, units and the server's messages. */

import { decodeMessage, encodeChunk } from "../../shared/audio/wire.js";
import { Resumption } from "./resumption.js";

export const REQUESTED_SPEC = { version: 1, partial_results: true, sound_in: "pcm16", sound_out: "pcm16", resume: true };
const PLAIN_SPEC = { version: 1, partial_results: false, sound_in: "base64", sound_out: "base64", resume: false };
const STOP_TIMEOUT_MS = 1500; // for the server's `stopped`, before the page closes the socket
const OPEN_TIMEOUT_MS = 15000;
const RESUMING = 4000; // close code of a connection that another one replaces
const STOPPED = /"type":\s*"stopped"/;

/** `omni_` or `adx_` and 16 hexadecimal digits. */
export function newSessionId(prefix) {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return prefix + Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function socketUrl(sessionId, query = "") {
  const url = new URL(`/ws/duplex/${sessionId}${query}`, location.href);
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
  #resumption = new Resumption();
  #isResuming = false;
  spec = PLAIN_SPEC;
  id;

  /**
   * @param {string} id @param {object} prepare fields of the message besides `spec`
   * @param {object} on called by message type; also "open", "unreadable" with the Error for a message
   *   that cannot be parsed, "lost" with {delayS} when the connection is lost and the session may go on, "resumed" with
   *   {seconds} when it does, and "closed" with {code, reason, opened, isIncomplete}, once; isIncomplete: the server
   *   has dropped messages that the page lacks
   */
  constructor(id, prepare, on) {
    this.id = id;
    this.#prepare = prepare;
    this.#on = on;
    this.#open("");
  }

  #open(query) {
    let opened = false;
    const socket = new WebSocket(socketUrl(this.id, query));
    this.#socket = socket;
    socket.binaryType = "arraybuffer";
    socket.onopen = () => {
      opened = true;
      clearTimeout(this.#timer);
      if (this.#isResuming) socket.send(JSON.stringify(this.#resumption.request()));
      else this.#on.open?.();
    };
    const lose = (event) => {
      if (socket !== this.#socket) return;
      if (this.#resumption.survives(event) && !this.#isStopping && !this.#isClosed) this.#resumeLater(event);
      else this.#close(event);
    };
    socket.onmessage = ({ data }) => socket === this.#socket && this.#take(data);
    socket.onclose = ({ code, reason }) => lose({ code, reason, opened });
    this.#timer = setTimeout(() => lose({ code: 1006, reason: "", opened }), OPEN_TIMEOUT_MS);
  }

  /** Try again after a while to continue over another connection. */
  #resumeLater(event) {
    clearTimeout(this.#timer);
    this.#isResuming = true;
    const delayS = this.#resumption.next();
    if (delayS === null) {
      this.#close(event);
      return;
    }
    this.#on.lost?.({ delayS });
    this.#timer = setTimeout(() => this.retry(), 1000 * delayS);
  }

  /** Continue over another connection now. @returns {boolean} whether the session waits for one */
  retry() {
    if (!this.#isResuming || this.#isClosed) return false;
    clearTimeout(this.#timer);
    this.#socket.close(RESUMING); // any final code would end a session that this socket has resumed
    this.#open("?resume=1");
    return true;
  }

  #takeResumed(message) {
    const seconds = this.#resumption.lostS;
    const missing = message.type === "session_resumed" ? this.#resumption.resumed(message) : null;
    if (missing === null) {
      this.#close({ code: 1006, reason: "", opened: true, isIncomplete: message.type === "session_resumed" });
      return;
    }
    this.#isResuming = false;
    for (const data of missing) this.#socket.send(data);
    this.#on.resumed?.({ seconds });
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
      this.#resumption.count(null);
      this.#on.unreadable?.(error);
      return;
    }
    this.#resumption.count(message);
    if (message.type === "messages_lost") {
      this.#close({ code: 1006, reason: "", opened: true, isIncomplete: true });
      return;
    }
    if (this.#isResuming) {
      this.#takeResumed(message);
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
    this.#send(JSON.stringify(message));
  }

  #send(data) {
    if (this.#socket.readyState !== WebSocket.OPEN || this.#isResuming) return false;
    this.#resumption.keep(data);
    this.#socket.send(data);
    return true;
  }

  /** Send one second of sound at 16 kHz and its pictures. @returns {boolean} whether the connection is open */
  sendUnit(samples, pictures, fields) {
    const acknowledgement = this.#resumption.acknowledgement();
    if (acknowledgement) this.send(acknowledgement);
    return this.#send(encodeChunk(fields, samples, pictures, this.spec.sound_in));
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
    this.#socket.close(1000); // other codes would keep the session
    if (!this.#isStopping) this.#on.closed?.(event);
  }
}
