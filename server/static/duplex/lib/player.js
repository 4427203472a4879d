/**
 * Playback from the page's side: sound of turns to the audio thread, what it reports back, flushing with its answer.
 *
 * Knows which worklet plays. Does not know messages of the server.
 */

const FLUSH_ANSWER_MS = 2000;

export class Player {
  #node;
  #flushes = new Map();
  #lastFlush = 0;

  /** on: what is called for "started", "gap", "ended" and "level", by name. */
  constructor(context, on) {
    this.#node = new AudioWorkletNode(context, "duologue-player", {
      numberOfInputs: 0, numberOfOutputs: 1, outputChannelCount: [1],
    });
    this.#node.connect(context.destination);
    this.#node.port.onmessage = ({ data }) => {
      if (data.type === "flushed") this.#flushed(data);
      else on[data.type]?.(data);
    };
  }

  static load(context) {
    return context.audioWorklet.addModule(new URL("./player-worklet.js", import.meta.url));
  }

  /** @param {Float32Array} samples 24 kHz; given away */
  play(samples, turn) {
    this.#node.port.postMessage({ type: "sound", samples, turn }, [samples.buffer]);
  }

  endTurn(turn) {
    this.#node.port.postMessage({ type: "end", turn });
  }

  tune(delayMs, lowMs) {
    this.#node.port.postMessage({ type: "tune", delayMs, lowMs });
  }

  /** Be silent at once. Resolves with ms until the audio thread said so, and samples at 24 kHz that were not heard. */
  flush() {
    const id = ++this.#lastFlush;
    const asked = performance.now();
    return new Promise((resolve, reject) => {
      const late = setTimeout(() => {
        this.#flushes.delete(id);
        reject(new Error(`flush: expected an answer within ${FLUSH_ANSWER_MS} ms, got none`));
      }, FLUSH_ANSWER_MS);
      this.#flushes.set(id, { asked, resolve, late });
      this.#node.port.postMessage({ type: "flush", id });
    });
  }

  #flushed({ id, lost }) {
    const flush = this.#flushes.get(id);
    if (!flush) return;
    this.#flushes.delete(id);
    clearTimeout(flush.late);
    flush.resolve({ ms: performance.now() - flush.asked, lost });
  }

  close() {
    this.#node.disconnect();
    this.#node.port.close();
  }
}
