/** Statistics of a conversation: response times, gaps, turns and flushes. */

export const DEADLINE_MS = 1000;

/** @param {number[]} values @param {number} share of the values, 0 to 1 @returns {number|null} null without values */
export function quantile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.ceil(share * sorted.length) - 1)];
}

export class Stats {
  constructor() {
    this.units = 0; // sent
    this.results = [];
    this.gaps = [];
    this.flushes = [];
    this.turns = [];
    this.errors = [];
    this.soundSeconds = 0;
    this.stretchedMs = 0;
    this.droppedMs = 0;
  }

  /** All statistics as plain data, for tests and diagnostics. */
  report() {
    return structuredClone({
      units: this.units,
      results: this.results,
      gaps: this.gaps,
      turns: this.turns,
      flushes: this.flushes,
      errors: this.errors,
      sound_seconds: this.soundSeconds,
      stretched_ms: this.stretchedMs,
      dropped_ms: this.droppedMs,
    });
  }

  figures() {
    const replies = this.results.map((result) => result.reply_ms);
    const firsts = this.turns.map((turn) => turn.heard_ms).filter((ms) => ms !== null);
    const answers = this.turns.filter(({ wait, waited_ms }) => wait && waited_ms !== null);
    const waits = answers.map(({ wait, heard_ms }) => wait.alignment + heard_ms);
    const last = answers.at(-1);
    return {
      answer: quantile(waits, 0.5),
      lastAnswer: last ? { ...last.wait, playback: last.waited_ms, total: waits.at(-1) } : null,
      units: this.results.length,
      replyP95: quantile(replies, 0.95),
      firstSound: quantile(firsts, 0.5),
      late: replies.filter((ms) => ms > DEADLINE_MS).length,
      context: this.results.at(-1)?.kv_cache_length ?? null,
      gaps: this.gaps.length,
      gapMs: this.gaps.reduce((sum, gap) => sum + gap.ms, 0),
    };
  }

  /** The summary that is sent to the server at the end. */
  summary() {
    const { replyP95, firstSound, answer, lastAnswer, ...rest } = this.figures();
    return {
      ...rest,
      answer_ms: answer,
      reply_p95_ms: replyP95,
      first_sound_ms: firstSound,
      turns: this.turns.length,
      flushes: this.flushes.length,
      sound_seconds: this.soundSeconds,
      stretched_ms: this.stretchedMs,
    };
  }
}
