/** The waveform of a replay as a slider: the user above the middle line, the model below it. */

import { byId } from "../../shared/dom.js";
import { clock, t } from "../../shared/i18n.js";
import { colorOf, onTheme } from "../../shared/theme.js";
import { PEAKS_PER_S } from "./wav-peaks.js";

const BAR = 3; // CSS pixels, with the gap of 1
const STEPS_S = { ArrowRight: 5, ArrowUp: 5, ArrowLeft: -5, ArrowDown: -5, PageUp: 30, PageDown: -30 };
const AHEAD = 0.35; // opacity of what has not been played

export class Waveform {
  #root = byId("wave");
  #canvas = byId("wave-canvas");
  #onSeek;
  #onToggle;
  #peaks = null;
  #at = 0;
  #seconds = 0;

  /** @param {(seconds: number) => void} onSeek @param {() => void} onToggle plays or pauses */
  constructor(onSeek, onToggle) {
    this.#onSeek = onSeek;
    this.#onToggle = onToggle;
    this.#root.addEventListener("pointerdown", (event) => this.#onPointer(event));
    this.#root.addEventListener("pointermove", (event) => event.buttons === 1 && this.#onPointer(event));
    this.#root.addEventListener("keydown", (event) => this.#onKey(event));
    new ResizeObserver(() => this.#draw()).observe(this.#root);
    onTheme(() => this.#draw());
  }

  /** @param {import("./wav-peaks.js").Peaks} peaks as far as they are read */
  set peaks(peaks) {
    this.#peaks = peaks;
    this.#seconds = peaks.seconds;
    this.move(this.#at);
  }

  /** Show the position. */
  move(seconds) {
    this.#at = seconds;
    this.#root.setAttribute("aria-valuemax", this.#seconds.toFixed(1));
    this.#root.setAttribute("aria-valuenow", seconds.toFixed(1));
    const values = { at: clock(seconds), all: clock(this.#seconds) };
    this.#root.setAttribute("aria-valuetext", t("position_of", values));
    byId("clock").textContent = `${values.at} / ${values.all}`;
    this.#draw();
  }

  #onPointer(event) {
    if (event.button > 0) return;
    const { left, width } = this.#root.getBoundingClientRect();
    if (event.type === "pointerdown") this.#root.setPointerCapture(event.pointerId);
    this.#seek(((event.clientX - left) / width) * this.#seconds);
  }

  #onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === " ") this.#onToggle();
    else if (event.key === "Home") this.#seek(0);
    else if (event.key === "End") this.#seek(this.#seconds);
    else if (event.key in STEPS_S) this.#seek(this.#at + STEPS_S[event.key]);
    else return;
    event.preventDefault();
  }

  #seek(seconds) {
    const at = Math.min(Math.max(seconds, 0), this.#seconds);
    this.move(at);
    this.#onSeek(at);
  }

  #draw() {
    const { clientWidth: width, clientHeight: height } = this.#root;
    const scale = window.devicePixelRatio;
    this.#canvas.width = width * scale;
    this.#canvas.height = height * scale;
    if (!this.#peaks || !this.#seconds) return;
    const pen = this.#canvas.getContext("2d");
    pen.scale(scale, scale);
    const played = (this.#at / this.#seconds) * width;
    const perBar = (this.#seconds * PEAKS_PER_S * BAR) / width;
    this.#peaks.channels.forEach((peaks, channel) => {
      pen.fillStyle = colorOf(this.#root, channel ? "--speak" : "--listen");
      for (let bar = 0; bar * BAR < width; bar++) {
        const first = Math.floor(bar * perBar);
        if (first >= peaks.length) break;
        const level = highest(peaks, first, Math.max(first + 1, Math.floor((bar + 1) * perBar)));
        const length = Math.max(1, Math.sqrt(level) * (height / 2 - 2));
        pen.globalAlpha = bar * BAR < played ? 1 : AHEAD;
        pen.fillRect(bar * BAR, channel ? height / 2 + 1 : height / 2 - length, BAR - 1, length);
      }
    });
    pen.globalAlpha = 1;
    pen.fillStyle = colorOf(this.#root, "--ink");
    pen.fillRect(Math.min(played, width - 2), 0, 2, height);
  }
}

function highest(peaks, from, to) {
  let level = 0;
  for (let i = from; i < Math.min(to, peaks.length); i++) level = Math.max(level, peaks[i]);
  return level;
}
