/** The live plot: the response time of each unit, the server's share of it, and the limit of one second. */

import { colorOf, onTheme } from "../../shared/theme.js";
import { DEADLINE_MS } from "../conversation/stats.js";

const UNITS = 60;
const COLORS = ["line", "muted", "bad", "listen", "speak"];
const PAD = { left: 4, right: 34, top: 10, bottom: 6 };

export class Plot {
  #canvas;
  #units = [];
  #colors = {};

  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.#canvas = canvas;
    new ResizeObserver(() => this.draw()).observe(canvas);
    onTheme(() => this.#recolor());
    this.#recolor();
  }

  #recolor() {
    for (const name of COLORS) this.#colors[name] = colorOf(this.#canvas, `--${name}`);
    this.draw();
  }

  clear() {
    this.#units = [];
    this.draw();
  }

  /** @param {{reply_ms: number, wall_clock_ms: number, is_listen: boolean}} unit */
  add(unit) {
    this.#units.push(unit);
    if (this.#units.length > UNITS) this.#units.shift();
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    this.#canvas.width = Math.round(width * scale);
    this.#canvas.height = Math.round(height * scale);
    const pen = this.#canvas.getContext("2d");
    pen.scale(scale, scale);
    const style = getComputedStyle(this.#canvas);
    const colors = this.#colors;
    const minBar = 2; // pixels, so that the shortest time is visible
    const maxMs = Math.max(1.15 * DEADLINE_MS, ...this.#units.map((unit) => 1.1 * unit.reply_ms));
    const x = (i) => PAD.left + (i / UNITS) * (width - PAD.left - PAD.right);
    const y = (ms) => height - PAD.bottom - (ms / maxMs) * (height - PAD.top - PAD.bottom);
    this.#line(pen, colors.line, y(0), width);
    pen.setLineDash([3, 4]);
    this.#line(pen, colors.muted, y(DEADLINE_MS), width);
    pen.setLineDash([]);
    pen.fillStyle = colors.muted;
    pen.font = `11px ${style.fontFamily}`;
    pen.textBaseline = "middle";
    pen.fillText(this.#canvas.dataset.limit ?? "", width - PAD.right + 6, y(DEADLINE_MS));
    const bar = Math.max(1, x(1) - x(0) - 1.5);
    const shift = UNITS - this.#units.length;
    this.#units.forEach((unit, i) => {
      const at = x(shift + i);
      const late = unit.reply_ms > DEADLINE_MS;
      const main = late ? colors.bad : unit.is_listen ? colors.listen : colors.speak;
      const top = (ms) => Math.min(y(ms), y(0) - minBar);
      this.#bar(pen, main, 0.35, at, top(unit.reply_ms), bar, y(0));
      this.#bar(pen, main, 1, at, top(Math.min(unit.wall_clock_ms, unit.reply_ms)), bar, y(0));
    });
  }

  #line(pen, color, y, width) {
    pen.strokeStyle = color;
    pen.beginPath();
    pen.moveTo(PAD.left, Math.round(y) - 0.5);
    pen.lineTo(width - PAD.right, Math.round(y) - 0.5);
    pen.stroke();
  }

  #bar(pen, color, alpha, x, top, width, bottom) {
    pen.globalAlpha = alpha;
    pen.fillStyle = color;
    pen.beginPath();
    pen.roundRect(x, top, width, Math.max(0, bottom - top), [Math.min(2, width / 2), Math.min(2, width / 2), 0, 0]);
    pen.fill();
    pen.globalAlpha = 1;
  }
}
