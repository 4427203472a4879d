/** What continues a session over another connection: the server's token, counts, and messages that may not have arrived. */

import { Backoff } from "./backoff.js";

const FIRST_S = 0.25;
const MAX_S = 4;
const MAX_KEPT_BYTES = 8 * 2 ** 20;
const ACKNOWLEDGED_EVERY = 8; // messages
const UNCOUNTED = ["queued", "queue_update", "queue_done", "session_resumed", "messages_lost"];
const LOST = 1006; // close code of a connection without a close frame
const RESTART = 1012; // of a gateway that ends, with the reason
const TRY_AGAIN = "Try again"; // if the session goes on over another connection

export class Resumption {
  #token = null;
  #graceS = 0;
  #received = 0; // messages of the server, from the first one with a token
  #acknowledged = 0;
  #sent = 0; // messages of the page
  #kept = []; // the newest of them: {number, data, bytes}
  #keptBytes = 0;
  #lostAt = null;
  #backoff = new Backoff(FIRST_S, MAX_S, Infinity);

  /** Whether the session goes on over another connection. @param {{code: number, reason: string}} close */
  survives({ code, reason }) {
    return this.#token !== null && (code === LOST || (code === RESTART && reason === TRY_AGAIN));
  }

  /** Seconds since the connection was lost. */
  get lostS() {
    return this.#lostAt === null ? 0 : (performance.now() - this.#lostAt) / 1000;
  }

  /** A message was sent. @param {string|ArrayBuffer} data */
  keep(data) {
    this.#sent += 1;
    const bytes = data.byteLength ?? data.length;
    this.#kept.push({ number: this.#sent, data, bytes });
    this.#keptBytes += bytes;
    while (this.#keptBytes > MAX_KEPT_BYTES) this.#keptBytes -= this.#kept.shift().bytes;
  }

  /** A message was received. @param {object|null} message null: it could not be read */
  count(message) {
    if (message?.type === "prepared") {
      this.#token = message.resume_token ?? null;
      this.#graceS = message.resume_grace_s ?? 0;
    }
    if (this.#received || (this.#token && message)) this.#received += UNCOUNTED.includes(message?.type) ? 0 : 1;
  }

  /** The message that acknowledges what was received; null if there is little of it. */
  acknowledgement() {
    if (this.#token === null || this.#received - this.#acknowledged < ACKNOWLEDGED_EVERY) return null;
    this.#acknowledged = this.#received;
    return { type: "received", count: this.#received };
  }

  /** The first message of another connection. */
  request() {
    return { type: "resume_session", token: this.#token, received: this.#received };
  }

  /** Seconds until the next attempt; null once the session is no longer kept. */
  next() {
    this.#lostAt ??= performance.now();
    const seconds = this.#backoff.next();
    return this.lostS + seconds > this.#graceS ? null : seconds;
  }

  /** The session goes on. @param {object} message `session_resumed` @returns {Array|null} messages to send; null: some are gone */
  resumed(message) {
    this.#token = message.resume_token;
    this.#lostAt = null;
    this.#backoff.reset();
    const missing = this.#kept.filter(({ number }) => number > message.received);
    const isComplete = missing.length === this.#sent - message.received && !message.lost;
    return isComplete ? missing.map(({ data }) => data) : null;
  }
}
