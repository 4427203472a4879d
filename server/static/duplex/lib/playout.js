/**
 * What is played when: turns behind one another, each after a cushion, without holes.
 *
 * A turn begins `delay` after its first sound came, or when all of it is there. While it goes on and little is left,
 * time is stretched: a piece of the last few milliseconds that fits is heard once more. Only when nothing at all is
 * left there is a gap, and it is counted to the sample. Knows samples at one rate and the order of turns; does not know
 * audio threads, sockets or clocks: its clock is what has been read.
 */

export const SOUND_RATE = 24000;
const PER_MS = SOUND_RATE / 1000;
const FADE = 5 * PER_MS; // samples that overlap where a piece is joined
const SHORTEST = FADE;
const LONGEST = 20 * PER_MS; // of a piece heard twice
const MOST_HELD = 60 * SOUND_RATE; // a server that sends more than this ahead is not heard further

const SPACING = { calm: 60 * PER_MS, urgent: 10 * PER_MS }; // between two pieces
const GOOD_FIT = 0.7;
const QUIET = 0.003; // RMS below which every piece fits

export class Playout {
  /** tell(event): `{type: "started"|"gap"|"ended", turn, ...}`, from inside `read`. */
  constructor(tell = () => {}) {
    this.tell = tell;
    this.delay = 200 * PER_MS;
    this.low = 120 * PER_MS;
    this.clock = 0;
    this.stretched = 0; // samples added so far
    this.dropped = 0;
    this.past = new Float32Array(LONGEST);
    this.flush();
  }

  /** delayMs: between a turn's first sound and its start. lowMs: with less than this left, time is stretched. */
  tune(delayMs, lowMs) {
    this.delay = Math.round(delayMs * PER_MS);
    this.low = Math.round(lowMs * PER_MS);
  }

  /** Samples that are still to be heard. */
  get depth() {
    return this.turns.reduce((sum, turn) => sum + turn.left, 0);
  }

  get isPlaying() {
    return this.turns.length > 0 && this.turns[0].state !== "cushion";
  }

  push(samples, number) {
    if (this.depth + samples.length > MOST_HELD) {
      this.dropped += samples.length;
      return;
    }
    let turn = this.turns.find((one) => one.number === number);
    if (!turn) {
      turn = { number, pieces: [], at: 0, left: 0, came: this.clock, over: false, state: "cushion", silence: 0 };
      this.turns.push(turn);
    }
    turn.pieces.push(samples);
    turn.left += samples.length;
  }

  /** Nothing more comes of this turn. */
  end(number) {
    const turn = this.turns.find((one) => one.number === number);
    if (turn) turn.over = true;
  }

  /** Be silent now. @returns {number} samples that are not heard */
  flush() {
    const lost = this.turns ? this.depth : 0;
    this.turns = [];
    this.sinceStretch = 0;
    this.past.fill(0);
    return lost;
  }

  /** Fill `out` with the next samples; silence where there is nothing to say. */
  read(out) {
    let at = 0;
    while (at < out.length) {
      const wanted = out.subarray(at);
      const turn = this.turns[0];
      const n = turn && this.#ready(turn) ? this.#play(turn, wanted) : this.#rest(turn, wanted);
      at += n;
      this.clock += n;
    }
    return out;
  }

  #ready(turn) {
    if (turn.state === "play") return true;
    // Behind a gap there has to be a cushion again: one hole instead of several.
    const enough = turn.state === "gap" ? turn.left > this.delay : this.clock - turn.came >= this.delay;
    if (!turn.over && !enough) return false;
    if (turn.state === "gap" && turn.left) {
      this.tell({ type: "gap", turn: turn.number, samples: turn.silence, ms: turn.silence / PER_MS });
    } else if (turn.state === "cushion") {
      this.tell({ type: "started", turn: turn.number, waitedMs: (this.clock - turn.came) / PER_MS });
    }
    turn.state = "play";
    turn.silence = 0;
    return true;
  }

  /** Silence up to the moment at which a waiting turn may begin. */
  #rest(turn, out) {
    let n = out.length;
    if (turn?.state === "cushion") n = Math.min(n, Math.max(1, turn.came + this.delay - this.clock));
    out.fill(0, 0, n);
    if (turn?.state === "gap") turn.silence += n;
    return n;
  }

  #play(turn, out) {
    if (!turn.left) {
      if (turn.over) {
        this.turns.shift();
        this.tell({ type: "ended", turn: turn.number });
      } else {
        turn.state = "gap";
      }
      return 0;
    }
    if (!turn.over && turn.left < this.low) this.#stretch(turn);
    const piece = turn.pieces[0];
    const n = Math.min(out.length, piece.length - turn.at);
    out.set(piece.subarray(turn.at, turn.at + n));
    turn.at += n;
    turn.left -= n;
    this.sinceStretch += n;
    this.#remember(out.subarray(0, n));
    if (turn.at === piece.length) {
      turn.pieces.shift();
      turn.at = 0;
    }
    return n;
  }

  #remember(samples) {
    const kept = samples.subarray(Math.max(0, samples.length - LONGEST));
    this.past.copyWithin(0, kept.length);
    this.past.set(kept, LONGEST - kept.length);
  }

  /** Put a piece of what was just heard in front of what comes, where it fits best. */
  #stretch(turn) {
    const calm = turn.left / this.low; // 1: hardly needed, 0: nothing left
    const spacing = SPACING.urgent + calm * (SPACING.calm - SPACING.urgent);
    if (turn.left < FADE || this.sinceStretch < spacing) return;
    const next = this.#peek(turn, FADE);
    const { length, fit } = this.#best(next);
    // The less there is left the worse a piece may fit: a rough join is better than a hole.
    if (fit < GOOD_FIT * (2 * calm - 1)) return;
    const from = LONGEST - length;
    const piece = this.past.slice(from);
    for (let i = 0; i < FADE; i++) {
      const share = (i + 0.5) / FADE;
      piece[i] = (1 - share) * next[i] + share * piece[i];
    }
    if (turn.at) {
      turn.pieces[0] = turn.pieces[0].subarray(turn.at);
      turn.at = 0;
    }
    turn.pieces.unshift(piece);
    turn.left += length;
    this.stretched += length;
    this.sinceStretch = -length; // counts once the piece has been heard
  }

  #peek(turn, n) {
    const out = new Float32Array(n);
    let at = 0;
    let offset = turn.at;
    for (const piece of turn.pieces) {
      const part = piece.subarray(offset, offset + n - at);
      out.set(part, at);
      at += part.length;
      offset = 0;
      if (at === n) break;
    }
    return out;
  }

  /** How far back the sound was most like what comes next; longer is better among equals. */
  #best(next) {
    const energy = next.reduce((sum, x) => sum + x * x, 0);
    if (Math.sqrt(energy / FADE) < QUIET) return { length: LONGEST, fit: 1 };
    let best = { length: LONGEST, fit: -1 };
    for (let length = LONGEST; length >= SHORTEST; length -= 2) {
      let product = 0;
      let power = 0;
      for (let i = 0; i < FADE; i++) {
        const x = this.past[LONGEST - length + i];
        product += x * next[i];
        power += x * x;
      }
      const fit = product / Math.sqrt(energy * power + 1e-12);
      if (fit > best.fit + 0.02) best = { length, fit };
    }
    return best;
  }
}
