/** Playback on the page's side: sends the sound of turns to the playback worklet and receives its events. */

const WORKLET = "/static/duplex/lib/player-worklet.js";
const FLUSH_TIMEOUT_MS = 2000;

export class Player {
  #node;
  output; // GainNode: the reply at its volume
  #flushes = new Map();
  #lastFlush = 0;

  /** on: handlers {started, gap, ended, level}. */
  constructor(context, on) {
    this.#node = new AudioWorkletNode(context, "duologue-player", {
      numberOfInputs: 0, numberOfOutputs: 1, outputChannelCount: [1],
    });
    this.output = new GainNode(context);
    this.#node.connect(this.output).connect(context.destination);
    this.#node.port.onmessage = ({ data }) => {
      if (data.type === "flushed") this.#flushed(data);
      else on[data.type]?.(data);
    };
  }

  static load(context) {
    return context.audioWorklet.addModule(WORKLET);
  }

  /** @param {number} volume 0 to 1 */
  set volume(volume) {
    this.output.gain.value = volume;
  }

  /** @param {Float32Array} samples 24 kHz; its buffer is transferred */
  play(samples, turn) {
    this.#node.port.postMessage({ type: "sound", samples, turn }, [samples.buffer]);
  }

  endTurn(turn) {
    this.#node.port.postMessage({ type: "end", turn });
  }

  tune(delayMs, lowMs) {
    this.#node.port.postMessage({ type: "tune", delayMs, lowMs });
  }

  /**
   * Discard all sound. Resolves with the ms until the worklet confirmed it, the samples that were not
   * played, and {turn, left} of the turn that was being played, or null.
   */
  flush() {
    const id = ++this.#lastFlush;
    const sentAt = performance.now();
    return new Promise((resolve, reject) => {
      const late = setTimeout(() => {
        this.#flushes.delete(id);
        reject(new Error(`flush: expected an answer within ${FLUSH_TIMEOUT_MS} ms, got none`));
      }, FLUSH_TIMEOUT_MS);
      this.#flushes.set(id, { sentAt, resolve, late });
      this.#node.port.postMessage({ type: "flush", id });
    });
  }

  #flushed({ id, lost, playing }) {
    const flush = this.#flushes.get(id);
    if (!flush) return;
    this.#flushes.delete(id);
    clearTimeout(flush.late);
    flush.resolve({ ms: performance.now() - flush.sentAt, lost, playing });
  }

  close() {
    this.#node.disconnect();
    this.output.disconnect();
    this.#node.port.close();
  }
}
