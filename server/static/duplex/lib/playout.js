/**
 * The playout buffer: plays turns one after the other, each after an initial delay, and avoids gaps.
 *
 * A turn starts `delay` after its first sound arrived, or at once if it is complete. When little sound is buffered,
 * playback is stretched: a segment of the last milliseconds is repeated where it fits. A gap occurs only if the buffer
 * is empty, and its length is counted in samples. The clock of this module is the number of samples read.
 */

export const SOUND_RATE = 24000;
const PER_MS = SOUND_RATE / 1000;
const FADE = 5 * PER_MS; // samples of the cross-fade at the end of a repeated segment
const MIN_SEGMENT = FADE;
const MAX_SEGMENT = 20 * PER_MS; // length of a repeated segment
const MAX_BUFFERED = 60 * SOUND_RATE; // sound beyond this is dropped

const SPACING = { calm: 60 * PER_MS, urgent: 10 * PER_MS }; // between two repeated segments
const GOOD_FIT = 0.7;
const QUIET = 0.003; // RMS below which any segment fits

export class Playout {
  /** onEvent(event): called by `read` with `{type: "started"|"gap"|"ended", turn, ...}`. */
  constructor(onEvent = () => {}) {
    this.onEvent = onEvent;
    this.delay = 200 * PER_MS;
    this.low = 120 * PER_MS;
    this.clock = 0;
    this.stretched = 0; // samples added so far
    this.dropped = 0;
    this.past = new Float32Array(MAX_SEGMENT);
    this.flush();
  }

  /** delayMs: between the first sound of a turn and its playback. lowMs: buffered sound below which it is stretched. */
  tune(delayMs, lowMs) {
    this.delay = Math.round(delayMs * PER_MS);
    this.low = Math.round(lowMs * PER_MS);
  }

  /** Number of buffered samples. */
  get depth() {
    return this.turns.reduce((sum, turn) => sum + turn.left, 0);
  }

  get isPlaying() {
    return this.turns.length > 0 && this.turns[0].state !== "waiting";
  }

  push(samples, number) {
    if (this.depth + samples.length > MAX_BUFFERED) {
      this.dropped += samples.length;
      return;
    }
    let turn = this.turns.find((one) => one.number === number);
    if (!turn) {
      turn = { number, blocks: [], at: 0, left: 0, arrivedAt: this.clock, over: false, state: "waiting", silence: 0 };
      this.turns.push(turn);
    }
    turn.blocks.push(samples);
    turn.left += samples.length;
  }

  /** Mark a turn as complete. */
  end(number) {
    const turn = this.turns.find((one) => one.number === number);
    if (turn) turn.over = true;
  }

  /** Number and unplayed samples of the turn that is being played; null if there is none. */
  get playing() {
    return this.isPlaying ? { turn: this.turns[0].number, left: this.turns[0].left } : null;
  }

  /** Discard all sound. @returns {number} samples that were not played */
  flush() {
    const lost = this.turns ? this.depth : 0;
    this.turns = [];
    this.sinceStretch = 0;
    this.past.fill(0);
    return lost;
  }

  /** Fill `out` with the next samples, or with silence. */
  read(out) {
    let at = 0;
    while (at < out.length) {
      const rest = out.subarray(at);
      const turn = this.turns[0];
      const n = turn && this.#ready(turn) ? this.#play(turn, rest) : this.#silence(turn, rest);
      at += n;
      this.clock += n;
    }
    return out;
  }

  #ready(turn) {
    if (turn.state === "play") return true;
    // After a gap the delay applies again, which makes one long gap out of several short ones.
    const enough = turn.state === "gap" ? turn.left > this.delay : this.clock - turn.arrivedAt >= this.delay;
    if (!turn.over && !enough) return false;
    if (turn.state === "gap" && turn.left) {
      this.onEvent({ type: "gap", turn: turn.number, samples: turn.silence, ms: turn.silence / PER_MS });
    } else if (turn.state === "waiting") {
      this.onEvent({ type: "started", turn: turn.number, waitedMs: (this.clock - turn.arrivedAt) / PER_MS });
    }
    turn.state = "play";
    turn.silence = 0;
    return true;
  }

  /** Silence until a waiting turn may start. */
  #silence(turn, out) {
    let n = out.length;
    if (turn?.state === "waiting") n = Math.min(n, Math.max(1, turn.arrivedAt + this.delay - this.clock));
    out.fill(0, 0, n);
    if (turn?.state === "gap") turn.silence += n;
    return n;
  }

  #play(turn, out) {
    if (!turn.left) {
      if (turn.over) {
        this.turns.shift();
        this.onEvent({ type: "ended", turn: turn.number });
      } else {
        turn.state = "gap";
      }
      return 0;
    }
    if (!turn.over && turn.left < this.low) this.#stretch(turn);
    const block = turn.blocks[0];
    const n = Math.min(out.length, block.length - turn.at);
    out.set(block.subarray(turn.at, turn.at + n));
    turn.at += n;
    turn.left -= n;
    this.sinceStretch += n;
    this.#remember(out.subarray(0, n));
    if (turn.at === block.length) {
      turn.blocks.shift();
      turn.at = 0;
    }
    return n;
  }

  #remember(samples) {
    const kept = samples.subarray(Math.max(0, samples.length - MAX_SEGMENT));
    this.past.copyWithin(0, kept.length);
    this.past.set(kept, MAX_SEGMENT - kept.length);
  }

  /** Repeat the segment of the last sound that fits best before the next sample. */
  #stretch(turn) {
    const calm = turn.left / this.low; // 1: the buffer is just below the limit; 0: it is empty
    const spacing = SPACING.urgent + calm * (SPACING.calm - SPACING.urgent);
    if (turn.left < FADE || this.sinceStretch < spacing) return;
    const next = this.#peek(turn, FADE);
    const { length, fit } = this.#best(next);
    // The less is buffered, the worse a segment may fit: an audible join is better than a gap.
    if (fit < GOOD_FIT * (2 * calm - 1)) return;
    const from = MAX_SEGMENT - length;
    const segment = this.past.slice(from);
    for (let i = 0; i < FADE; i++) {
      const share = (i + 0.5) / FADE;
      segment[i] = (1 - share) * next[i] + share * segment[i];
    }
    if (turn.at) {
      turn.blocks[0] = turn.blocks[0].subarray(turn.at);
      turn.at = 0;
    }
    turn.blocks.unshift(segment);
    turn.left += length;
    this.stretched += length;
    this.sinceStretch = -length; // counts from the end of the segment
  }

  #peek(turn, n) {
    const out = new Float32Array(n);
    let at = 0;
    let offset = turn.at;
    for (const block of turn.blocks) {
      const part = block.subarray(offset, offset + n - at);
      out.set(part, at);
      at += part.length;
      offset = 0;
      if (at === n) break;
    }
    return out;
  }

  /** Length and correlation of the segment most similar to the next samples. Prefers longer ones at similar values. */
  #best(next) {
    const energy = next.reduce((sum, x) => sum + x * x, 0);
    if (Math.sqrt(energy / FADE) < QUIET) return { length: MAX_SEGMENT, fit: 1 };
    let best = { length: MAX_SEGMENT, fit: -1 };
    for (let length = MAX_SEGMENT; length >= MIN_SEGMENT; length -= 2) {
      let product = 0;
      let power = 0;
      for (let i = 0; i < FADE; i++) {
        const x = this.past[MAX_SEGMENT - length + i];
        product += x * next[i];
        power += x * x;
      }
      const fit = product / Math.sqrt(energy * power + 1e-12);
      if (fit > best.fit + 0.02) best = { length, fit };
    }
    return best;
  }
}
