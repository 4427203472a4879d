/**
 * The microphone's audio worklet: resamples to 16 kHz and splits the sound into units of exactly one second,
 * or of `processorOptions.unit` samples.
 *
 * Receives {type: "run", on}, which starts a new unit or stops, and {type: "cut", unit, edge}, the length of later
 * units. With `edge`, in samples since the first unit, no later unit crosses that point or one whole seconds away from
 * it. Sends {type: "soon"} 150 ms before a unit is complete, so that a picture can be taken; {type: "unit", samples,
 * end}, where `end` counts the samples of all units up to this one; and {type: "level", rms} 15 times a second.
 */

import { Resampler } from "./resampler.js";

const UNIT_RATE = 16000;
const UNIT = 16000; // samples, unless the page asks for another length
const SOON = 2400; // 150 ms before the end
const SHORTEST = 640; // samples; if fewer would be left before an edge, the unit before them is longer by these
const LEVEL_S = 1 / 15;

class Capture extends AudioWorkletProcessor {
  constructor({ processorOptions }) {
    super();
    this.length = this.nextLength = processorOptions?.unit ?? UNIT;
    this.edge = null;
    this.at = 0; // samples in all complete units
    this.resampler = sampleRate === UNIT_RATE ? null : new Resampler(sampleRate, UNIT_RATE);
    this.unit = new Float32Array(this.length);
    this.filled = 0;
    this.on = false;
    this.energy = 0;
    this.counted = 0;
    this.port.onmessage = ({ data }) => {
      if (data.type === "cut") {
        this.nextLength = data.unit;
        this.edge = data.edge ?? null;
        if (!this.filled) this.begin();
        return;
      }
      this.on = data.on;
      this.begin();
    };
  }

  process([channels]) {
    const input = channels[0] ?? new Float32Array(128); // a disconnected microphone counts as silence
    this.measure(input);
    const samples = this.resampler ? this.resampler.process(input) : input;
    if (this.on) this.collect(samples);
    return true;
  }

  begin() {
    const rest = this.edge === null ? Infinity : UNIT - (((this.at - this.edge) % UNIT) + UNIT) % UNIT;
    this.length = rest - this.nextLength < SHORTEST ? rest : this.nextLength;
    this.unit = new Float32Array(this.length);
    this.filled = 0;
  }

  collect(samples) {
    let at = 0;
    while (at < samples.length) {
      const soon = this.length - SOON;
      const n = Math.min(this.length - this.filled, samples.length - at);
      this.unit.set(samples.subarray(at, at + n), this.filled);
      if (this.filled < soon && this.filled + n >= soon) this.port.postMessage({ type: "soon" });
      this.filled += n;
      at += n;
      if (this.filled < this.length) continue;
      const full = this.unit;
      this.at += full.length;
      this.begin();
      this.port.postMessage({ type: "unit", samples: full, end: this.at }, [full.buffer]);
    }
  }

  measure(input) {
    for (let i = 0; i < input.length; i++) this.energy += input[i] * input[i];
    this.counted += input.length;
    if (this.counted < LEVEL_S * sampleRate) return;
    this.port.postMessage({ type: "level", rms: Math.sqrt(this.energy / this.counted) });
    this.energy = this.counted = 0;
  }
}

registerProcessor("duologue-capture", Capture);
