/** Microphone and playback of one conversation, on one audio context. */

import { Capture } from "../../shared/audio/capture.js";
import { PlayoutDelay } from "../../shared/audio/playout-delay.js";
import { Player } from "../../shared/audio/player.js";
import { VoiceDetector } from "../../shared/audio/voice-detector.js";

/** An audio context that resumes by itself while it is wanted: a phone call suspends it, and no unit would complete. */
export function makeContext(isWanted) {
  const context = new AudioContext({ latencyHint: "interactive" });
  context.onstatechange = () => isWanted() && context.state !== "running" && context.resume().catch(() => {});
  return context;
}

export class Sound {
  context;
  capture;
  player;
  delay; // PlayoutDelay
  #detector = null;
  #isClosed = false;

  /**
   * Request the microphone and load the worklets.
   * @param {AudioContext} context @param {{mic: string, playbackDelayMs: number, volume: number}} settings
   * @param {object} on handlers of `Capture` and `Player`: soon, unit, level, lost; started, ended, gap, played;
   *   speech, detected() when the detector runs
   * @returns {Promise<Sound>} @throws {DOMException}
   */
  static async open(context, settings, on) {
    const [stream] = await Promise.all([Capture.open(settings.mic), context.resume()]);
    try {
      await Promise.all([Capture.load(context), Player.load(context)]);
    } catch (error) {
      Capture.stop(stream);
      throw error;
    }
    return new Sound(context, stream, settings, on);
  }

  constructor(context, stream, settings, on) {
    this.context = context;
    this.capture = new Capture(context, on);
    this.capture.use(stream);
    this.player = new Player(context, { started: on.started, ended: on.ended, gap: on.gap, level: on.played });
    this.player.volume = settings.volume;
    this.delay = new PlayoutDelay(settings.playbackDelayMs);
    this.tune();
    this.#detect(on).catch(() => on.undetected()); // the conversation goes on without barge-in
  }

  async #detect(on) {
    const weights = await VoiceDetector.load(this.context);
    if (this.#isClosed) return;
    this.#detector = new VoiceDetector(this.context, weights, this.capture.mic, this.player.output, on.speech);
    on.detected();
  }

  /** @param {{on: boolean, active: boolean, confirmMs: number}} state of `VoiceDetector.tune` */
  watchVoice(state) {
    this.#detector?.tune({ ...state, isCancelled: this.capture.isCancelled });
  }

  /** Apply the current playback delay. */
  tune() {
    this.player.tune(this.delay.delayMs, this.delay.lowMs);
  }

  /** Silence playback at once and release the microphone. Resolves with the player's flush, null if it has ended. */
  async close() {
    this.#isClosed = true;
    this.#detector?.close();
    const flushed = this.player.flush().catch(() => null); // the audio thread has ended, and its sound with it
    this.capture.close();
    const flush = await flushed;
    this.player.close();
    return flush;
  }
}
