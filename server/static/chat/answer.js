/** One answer: the WebSocket of a chat, from the request to `done`. */

import { decodeMessage } from "../shared/audio/wire.js";
import { socketUrl } from "../shared/socket.js";

export class Answer {
  #socket;
  #isOver = false;

  /**
   * @param {string} request its JSON
   * @param {object} on handlers by message type: queued, queue_update, queue_done, prefill_done, chunk, done;
   *   failed({error, code}) at most once, and nothing after it
   */
  constructor(request, on) {
    let opened = false;
    const end = (failure) => {
      if (this.#isOver) return;
      this.#isOver = true;
      this.#socket.close();
      if (failure) on.failed(failure);
    };
    this.#socket = new WebSocket(socketUrl("/ws/chat"));
    this.#socket.onopen = () => {
      opened = true;
      this.#socket.send(request);
    };
    this.#socket.onmessage = ({ data }) => {
      if (this.#isOver) return;
      const message = decodeMessage(data, "base64");
      if (message.type === "error") {
        end({ error: message.error, code: message.code });
        return;
      }
      on[message.type]?.(message);
      if (message.type === "done") end(null);
    };
    this.#socket.onclose = () => end({ error: "", code: opened ? "connection_lost" : "connection_refused" });
  }

  /** Close the socket, which ends the answer at its next token. No handler is called any more. */
  stop() {
    this.#isOver = true;
    this.#socket.close();
  }
}
