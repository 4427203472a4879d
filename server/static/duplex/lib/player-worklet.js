/**
 * The audio worklet of playback: reads 24 kHz sound from a Playout and resamples it to the context's rate.
 *
 * Receives {type: "sound", samples, turn}, {type: "end", turn}, {type: "flush", id} and {type: "tune", delayMs, lowMs}.
 * Sends the Playout's events with the context's time, {type: "flushed", id, lost, playing}, and {type: "level"} 15 times a
 * second.
 */

import { Playout, SOUND_RATE } from "./playout.js";
import { Resampler } from "./resampler.js";

const LEVEL_S = 1 / 15;
const BLOCK = 64; // samples taken from the Playout at a time

class Player extends AudioWorkletProcessor {
  constructor() {
    super();
    this.playout = new Playout((event) => this.port.postMessage({ ...event, at: currentTime }));
    this.resampler = sampleRate === SOUND_RATE ? null : new Resampler(SOUND_RATE, sampleRate);
    this.ready = new Float32Array(0);
    this.block = new Float32Array(BLOCK);
    this.energy = 0;
    this.counted = 0;
    this.port.onmessage = ({ data }) => this.take(data);
  }

  take(message) {
    const { playout } = this;
    if (message.type === "sound") playout.push(message.samples, message.turn);
    else if (message.type === "end") playout.end(message.turn);
    else if (message.type === "tune") playout.tune(message.delayMs, message.lowMs);
    else if (message.type === "flush") {
      const { playing } = playout;
      const lost = playout.flush();
      this.resampler?.reset();
      this.ready = new Float32Array(0);
      this.port.postMessage({ type: "flushed", id: message.id, lost, playing });
    }
  }

  process(_, [[out, ...others]]) {
    let at = 0;
    while (at < out.length) {
      if (!this.ready.length) {
        const block = this.playout.read(this.block);
        this.ready = this.resampler ? this.resampler.process(block) : block.slice();
        continue;
      }
      const n = Math.min(out.length - at, this.ready.length);
      out.set(this.ready.subarray(0, n), at);
      this.ready = this.ready.subarray(n);
      at += n;
    }
    for (const other of others) other.set(out);
    this.measure(out);
    return true;
  }

  measure(out) {
    for (let i = 0; i < out.length; i++) this.energy += out[i] * out[i];
    this.counted += out.length;
    if (this.counted < LEVEL_S * sampleRate) return;
    const { depth, stretched, dropped, isPlaying } = this.playout;
    const rms = Math.sqrt(this.energy / this.counted);
    const toMs = (samples) => (1000 * samples) / SOUND_RATE;
    this.port.postMessage({
      type: "level", rms, isPlaying, depthMs: toMs(depth), stretchedMs: toMs(stretched), droppedMs: toMs(dropped),
    });
    this.energy = this.counted = 0;
  }
}

registerProcessor("duologue-player", Player);
