/** Detects that the user speaks while the model does: audio worklet, worker with the network, one event. */

const WORKLET = "/static/duplex/lib/windows-worklet.js";
const WORKER = "/static/shared/audio/voice-worker.js";
const WEIGHTS = "/api/vad/weights";

export class VoiceDetector {
  #node;
  #worker;

  /** @returns {Promise<ArrayBuffer>} the network's weights @throws {Error} if the server has none */
  static async load(context) {
    const [response] = await Promise.all([fetch(WEIGHTS), context.audioWorklet.addModule(WORKLET)]);
    if (!response.ok) throw new Error(`${WEIGHTS}: expected status 200, got ${response.status}`);
    return response.arrayBuffer();
  }

  /**
   * @param {AudioContext} context @param {ArrayBuffer} weights of `load`
   * @param {Channel} mic @param {AudioNode} played the reference for echo
   * @param {() => void} speech called when speech is confirmed, once for each time that `tune` makes it active
   */
  constructor(context, weights, mic, played, speech) {
    this.#node = new AudioWorkletNode(context, "duologue-windows", {
      numberOfInputs: 2, numberOfOutputs: 1, channelCount: 1, channelCountMode: "explicit",
    });
    mic.connect(this.#node);
    played.connect(this.#node, 0, 1);
    this.#node.connect(context.destination); // silent; browsers run only nodes that are connected
    const { port1, port2 } = new MessageChannel();
    this.#node.port.postMessage({ type: "port", port: port1 }, [port1]);
    this.#worker = new Worker(WORKER, { type: "module" });
    this.#worker.onmessage = ({ data }) => speech(data);
    this.#worker.postMessage({ type: "start", weights, port: port2 }, [weights, port2]);
  }

  /**
   * @param {{on: boolean, active: boolean, confirmMs: number, isCancelled: boolean}} state active: while the model
   *   speaks; isCancelled: the browser's echo canceller is active
   */
  tune(state) {
    this.#worker.postMessage({ type: "tune", ...state });
  }

  close() {
    this.#worker.terminate();
    this.#node.disconnect();
    this.#node.port.close();
  }
}
