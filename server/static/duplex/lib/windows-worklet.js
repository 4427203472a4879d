/**
 * The voice detector's audio worklet: two inputs, the microphone and what is played, as windows of 512 samples at
 * 16 kHz. Receives {type: "port", port}, and sends {mic, played} to that port.
 */

import { Resampler } from "./resampler.js";

const RATE = 16000;
const WINDOW = 512;
const SILENCE = new Float32Array(128); // of an input without a source

class Windows extends AudioWorkletProcessor {
  constructor() {
    super();
    const make = () => (sampleRate === RATE ? null : new Resampler(sampleRate, RATE));
    this.resamplers = [make(), make()];
    this.windows = [new Float32Array(WINDOW), new Float32Array(WINDOW)];
    this.filled = 0;
    this.port.onmessage = ({ data }) => (this.target = data.port);
  }

  process(inputs) {
    const sounds = this.resamplers.map((one, i) => {
      const input = inputs[i][0] ?? SILENCE;
      return one ? one.process(input) : input;
    });
    for (let at = 0; at < sounds[0].length; ) {
      const n = Math.min(WINDOW - this.filled, sounds[0].length - at);
      for (const i of [0, 1]) this.windows[i].set(sounds[i].subarray(at, at + n), this.filled);
      this.filled += n;
      at += n;
      if (this.filled === WINDOW) this.send();
    }
    return true;
  }

  send() {
    const [mic, played] = this.windows;
    this.windows = [new Float32Array(WINDOW), new Float32Array(WINDOW)];
    this.filled = 0;
    this.target?.postMessage({ mic, played }, [mic.buffer, played.buffer]);
  }
}

registerProcessor("duologue-windows", Windows);
