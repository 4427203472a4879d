/** A recording of a conversation: left what the microphone hears, right what is played, on one clock. */

import { wavOfPcm16 } from "./wav.js";
import { toPcm16 } from "./wire.js";

const WORKLET = "/static/duplex/lib/windows-worklet.js";
const RATE = 16000;
const MAX_S = 3600; // later sound is left out

export class StereoRecorder {
  #node;
  #port;
  #windows = []; // pcm16, left and right alternate
  #samples = 0;

  static load(context) {
    return context.audioWorklet.addModule(WORKLET);
  }

  /** Record from now on. @param {AudioContext} context after `load` @param {Channel} mic @param {AudioNode} played */
  constructor(context, mic, played) {
    this.#node = new AudioWorkletNode(context, "duologue-windows", {
      numberOfInputs: 2, numberOfOutputs: 1, channelCount: 1, channelCountMode: "explicit",
    });
    mic.connect(this.#node);
    played.connect(this.#node, 0, 1);
    this.#node.connect(context.destination); // silent; browsers run only nodes that are connected
    const { port1, port2 } = new MessageChannel();
    this.#port = port2;
    this.#port.onmessage = ({ data }) => this.#add(data.mic, data.played);
    this.#node.port.postMessage({ type: "port", port: port1 }, [port1]);
  }

  #add(mic, played) {
    if (this.#samples >= MAX_S * RATE) return;
    const both = new Float32Array(2 * mic.length);
    for (let i = 0; i < mic.length; i++) {
      both[2 * i] = mic[i];
      both[2 * i + 1] = played[i];
    }
    this.#windows.push(toPcm16(both));
    this.#samples += mic.length;
  }

  /** Stop recording. @returns {Blob} WAV, 16 kHz, two channels */
  close() {
    this.#port.close();
    this.#node.disconnect();
    this.#node.port.close();
    return wavOfPcm16(this.#windows, RATE, 2);
  }
}
