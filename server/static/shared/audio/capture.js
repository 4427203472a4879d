/**
 * The microphone, with the browser's echo cancellation, and further sources mixed to it. Its worklet splits the sound
 * into units, of one second by default.
 */

import { Channel } from "./channel.js";

const WORKLET = "/static/duplex/lib/capture-worklet.js";

export class Capture {
  #context;
  #node;
  #source = null;
  #stream = null;
  #muted = false;
  #closed = false;
  mic; // Channel of the microphone
  mix; // GainNode that all sources are connected to

  /**
   * on: handlers {soon, unit, level, lost}; `unit` gets {samples, end}, where `end` counts the samples of all units up
   * to this one; `lost` is called when the device is disconnected.
   * unit: samples of a unit at 16 kHz; `soon` is not called for units of 2400 and fewer.
   */
  constructor(context, on, unit = 16000) {
    this.#context = context;
    this.on = on;
    this.#node = new AudioWorkletNode(context, "duologue-capture", {
      numberOfInputs: 1, numberOfOutputs: 1, channelCount: 1, channelCountMode: "explicit",
      processorOptions: { unit },
    });
    this.mix = new GainNode(context);
    this.mic = new Channel(context);
    this.mic.connect(this.mix);
    this.mix.connect(this.#node);
    // Browsers run only nodes that are connected to the destination. This output is silent.
    this.#node.connect(context.destination);
    this.#node.port.onmessage = ({ data }) => on[data.type]?.(data);
  }

  static load(context) {
    return context.audioWorklet.addModule(WORKLET);
  }

  /** Request a microphone. @throws {DOMException} */
  static open(deviceId = "") {
    return navigator.mediaDevices.getUserMedia({
      audio: {
        ...(deviceId && { deviceId: { ideal: deviceId } }),
        echoCancellation: true,
        noiseSuppression: true,
        autoGainControl: true,
        channelCount: { ideal: 1 },
      },
    });
  }

  /** Stop a stream that `open` returned. */
  static stop(stream) {
    for (const track of stream.getTracks()) track.stop();
  }

  /** Capture a stream that `open` returned, in place of the current one. After `close`, stop it instead. */
  use(stream) {
    if (this.#closed) {
      Capture.stop(stream);
      return;
    }
    this.#release();
    this.#stream = stream;
    this.#source = this.#context.createMediaStreamSource(stream);
    this.#source.connect(this.mic.input);
    const [track] = stream.getAudioTracks();
    track.addEventListener("ended", () => this.on.lost?.());
    this.mute(this.#muted);
  }

  /** The microphone's track. @returns {MediaStreamTrack} */
  get track() {
    return this.#stream.getAudioTracks()[0];
  }

  /** Whether the browser's echo canceller is active for the microphone. */
  get isCancelled() {
    return this.#stream?.getAudioTracks()[0].getSettings().echoCancellation === true;
  }

  /** Mute or unmute the microphone. While muted, silence is sent in its place and the conversation continues. */
  mute(muted) {
    this.#muted = muted;
    for (const track of this.#stream?.getAudioTracks() ?? []) track.enabled = !muted;
  }

  /** Start or stop producing units. An incomplete unit is dropped. */
  run(on) {
    this.#node.port.postMessage({ type: "run", on });
  }

  /**
   * Produce units of another length from the next one on.
   * @param {number} unit samples at 16 kHz
   * @param {number} edge that no unit crosses, nor points whole seconds away from it; in samples, as `end` of `unit`
   */
  cut(unit, edge) {
    this.#node.port.postMessage({ type: "cut", unit, edge });
  }

  #release() {
    this.#source?.disconnect();
    if (this.#stream) Capture.stop(this.#stream);
    this.#source = this.#stream = null;
  }

  close() {
    this.#closed = true;
    this.#release();
    this.mic.close();
    this.mix.disconnect();
    this.#node.disconnect();
    this.#node.port.close();
  }
}
