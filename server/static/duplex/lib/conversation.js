/**
 * One conversation: sends microphone and camera to the server, plays the model's turns, and keeps the state.
 *
 * Decides the order of permissions and connections, the turn of each sound, and which sound is dropped after an
 * interrupt. Does not access the page; it calls `ui`.
 */

import { Capture } from "./capture.js";
import { PlayoutDelay } from "./playout-delay.js";
import { Player } from "./player.js";
import { Session, newSessionId } from "./session.js";
import { Stats } from "./stats.js";
import { endsConversation, replacesResult, startErrorCode, timeoutCode } from "./errors.js";

const SOUND_RATE = 24000;
const PICTURE_TIMEOUT_MS = 80;
const MAX_UNANSWERED = 20; // units without an answer after which the connection counts as broken
const LIVE = ["listening", "speaking"];

export class Conversation {
  #context = null;
  #capture = null;
  #player = null;
  #session = null;
  #camera;
  #settings;
  #ui;
  #playoutDelay = null;
  #waiting = []; // units sent without an answer so far: {number, sentAt, firstSound}
  #turn = null; // the current one: {number, cut, record}
  #lastTurn = 0;
  #dropThrough = 0; // sound of units up to this number is dropped
  #lock = null;
  #attempt = 0;
  muted = false;
  forceListen = false;
  state = "idle";
  stats = new Stats();

  /**
   * @param {import("./camera.js").Camera} camera
   * @param {() => object} settings {mic, speaker, playbackDelayMs, detailed, prefix, wantsCamera, prepare(): object}
   * @param {object} ui state(name, details) caption(turn, text) turnEnded(turn, cut) unit(result) gap(gap)
   *   micLevel(rms) modelLevel(rms) error(code, text) notice(code)
   */
  constructor(camera, settings, ui) {
    this.#camera = camera;
    this.#settings = settings;
    this.#ui = ui;
  }

  get isLive() {
    return LIVE.includes(this.state);
  }

  get isOpen() {
    return !["idle", "ended", "failed"].includes(this.state);
  }

  /** Start: permissions, connection, first unit. Call it from a click handler: browsers allow sound only then. */
  async start() {
    if (this.isOpen) return;
    const attempt = ++this.#attempt;
    this.#reset();
    this.#setState("asking");
    const settings = this.#settings();
    try {
      await this.#openSound(settings, attempt);
      if (settings.wantsCamera && attempt === this.#attempt) await this.#openCamera(settings, attempt);
      if (attempt !== this.#attempt) return; // stopped while the browser showed its permission dialog
      const prepare = await settings.prepare();
      if (attempt === this.#attempt) this.#connect(settings, prepare);
    } catch (error) {
      if (attempt === this.#attempt) this.#fail(startErrorCode(error), error.message);
    }
  }

  #reset() {
    this.stats = new Stats();
    this.#waiting = [];
    this.#turn = null;
    this.#lastTurn = this.#dropThrough = 0;
  }

  /** Open microphone and playback. Leaves nothing open if the attempt was stopped, as another may have started. */
  async #openSound(settings, attempt) {
    if (!navigator.mediaDevices) throw Object.assign(new Error(location.origin), { name: "InsecureContext" });
    // Created before the first await, while the call still counts as caused by the click.
    const context = (this.#context ??= this.#makeContext());
    const [stream] = await Promise.all([Capture.open(settings.mic), context.resume()]);
    try {
      await Promise.all([Capture.load(context), Player.load(context)]);
    } catch (error) {
      Capture.stop(stream);
      throw error;
    }
    if (attempt !== this.#attempt) {
      Capture.stop(stream);
      return;
    }
    this.#capture = new Capture(context, {
      soon: () => this.#camera.snap(),
      unit: ({ samples }) => this.#sendUnit(samples),
      level: ({ rms }) => this.#ui.micLevel(this.muted ? 0 : rms),
      lost: () => this.isOpen && this.#fail("mic_lost", ""),
    });
    this.#capture.use(stream);
    this.#capture.mute(this.muted);
    this.#player = new Player(context, {
      started: (event) => this.#onStarted(event),
      ended: () => this.isLive && this.#setState("listening"),
      gap: (event) => this.#onGap(event),
      level: (event) => this.#onLevel(event),
    });
    this.#playoutDelay = new PlayoutDelay(settings.playbackDelayMs);
    this.#tune();
    await this.useSpeaker(settings.speaker);
  }

  #makeContext() {
    const context = new AudioContext({ latencyHint: "interactive" });
    // A phone call suspends the context; without it no unit completes.
    context.onstatechange = () => this.isOpen && context.state !== "running" && context.resume().catch(() => {});
    return context;
  }

  async #openCamera(settings, attempt) {
    this.#camera.detailed = settings.detailed;
    try {
      if (!this.#camera.isOn) await this.#camera.open(settings.camera);
    } catch (error) {
      if (attempt !== this.#attempt) return;
      this.#ui.notice(error.name === "NotAllowedError" ? "camera_denied" : "camera_missing");
    }
  }

  #connect(settings, prepare) {
    this.#setState("connecting");
    this.#session = new Session(newSessionId(settings.prefix), prepare, {
      queued: (message) => this.#setState("queued", message),
      queue_update: (message) => this.#setState("queued", message),
      queue_done: () => this.#setState("preparing"),
      prepared: (message) => this.#onPrepared(message),
      partial: (message) => this.#onPartial(message),
      result: (message) => this.#onResult(message),
      paused: (message) => this.state === "paused" && this.#setState("paused", message),
      stopped: () => this.#session?.close(),
      timeout: (message) => this.#fail(timeoutCode(message, this.state), ""),
      error: (message) => this.#onError(message),
      unreadable: (error) => this.#onUnreadable(error),
      closed: (event) => this.#onClosed(event),
    });
  }

  // --- sending ---------------------------------------------------------------------------------

  async #sendUnit(samples) {
    if (!this.isLive) return;
    const session = this.#session;
    const picture = await this.#camera.picture(PICTURE_TIMEOUT_MS);
    if (!this.isLive || session !== this.#session) return;
    const fields = this.forceListen ? { force_listen: true } : {};
    if (!session.sendUnit(samples, picture ? [picture] : [], fields)) return;
    this.stats.units += 1;
    this.#waiting.push({ number: this.stats.units, sentAt: performance.now(), firstSound: null });
    if (this.#waiting.length > MAX_UNANSWERED) this.#fail("no_answer", "");
  }

  /** Interrupt the current turn, here at once and at the server. Resolves when playback is silent. */
  async interrupt() {
    if (!this.isLive) return;
    this.#session.send({ type: "interrupt" });
    if (this.#turn) this.#cut();
    await this.#flush("interrupt");
  }

  async pause() {
    if (!this.isLive) return;
    this.#capture.run(false);
    this.#session.send({ type: "pause" });
    this.#setState("paused");
    await this.#flush("pause");
  }

  resume() {
    if (this.state !== "paused") return;
    this.#session.send({ type: "resume" });
    this.#setState("listening");
    this.#capture.run(true);
  }

  stop() {
    if (!this.isOpen) return;
    this.#attempt += 1;
    const session = this.#session;
    if (session && this.stats.units) session.report("session_summary", this.stats.summary());
    session?.stop();
    this.#end("ended");
  }

  mute(muted) {
    this.muted = muted;
    this.#capture?.mute(muted);
  }

  async useMicrophone(deviceId) {
    const capture = this.#capture;
    capture?.use(await Capture.open(deviceId)); // stops the stream if the conversation has ended meanwhile
  }

  async useSpeaker(deviceId) {
    if (!this.#context?.setSinkId) return;
    await this.#context.setSinkId(deviceId).catch(() => this.#ui.notice("speaker_missing"));
  }

  #cut() {
    this.#turn.cut = true;
    this.#turn.record.cut = true;
    this.#ui.turnEnded(this.#turn.number, true);
  }

  async #flush(reason) {
    this.#dropThrough = this.stats.units;
    const { ms, lost } = await this.#player.flush();
    this.stats.flushes.push({ ms, why: reason, lost_samples: lost });
    if (this.isLive) this.#setState("listening");
  }

  // --- receiving -------------------------------------------------------------------------------

  #onPrepared(message) {
    this.#setState("listening", { notes: message.notes ?? [] });
    this.#capture.run(true);
    navigator.wakeLock?.request("screen").then(
      (lock) => (this.isOpen ? (this.#lock = lock) : lock.release()),
      () => {}, // optional: browsers refuse it on low battery
    );
  }

  #onPartial(message) {
    const unit = this.#waiting[0];
    if (!unit) return;
    this.#openTurn();
    if (message.text) this.#addText(unit, message.text);
    if (message.sound) this.#addSound(unit, message.sound);
  }

  #onResult(message) {
    const unit = this.#waiting.shift();
    if (!unit) return;
    const now = performance.now();
    if (!message.is_listen) this.#openTurn();
    if (message.sound) this.#addSound(unit, message.sound);
    if (message.text && !unit.text) this.#addText(unit, message.text);
    const { type, sound, ...facts } = message;
    const result = { ...facts, unit: unit.number, turn: this.#turn?.number ?? null, reply_ms: now - unit.sentAt,
      first_sound_ms: unit.firstSound };
    this.stats.results.push(result);
    if (this.#turn && (message.is_listen || message.end_of_turn)) this.#closeTurn();
    this.#ui.unit(result);
  }

  #openTurn() {
    if (this.#turn) return;
    const record = {
      turn: ++this.#lastTurn, text: "", sound_ms: 0, first_sound_ms: null, heard_ms: null, waited_ms: null, cut: false,
      over: false,
    };
    this.stats.turns.push(record);
    this.#turn = { number: record.turn, cut: false, record, sentAt: null };
  }

  #closeTurn() {
    const { number, record, cut } = this.#turn;
    record.over = true;
    this.#player.endTurn(number);
    this.#turn = null;
    if (!cut) this.#ui.turnEnded(number, false);
  }

  #addText(unit, text) {
    unit.text = (unit.text ?? "") + text;
    if (this.#turn.cut) return;
    this.#turn.record.text += text;
    this.#ui.caption(this.#turn.number, text);
  }

  #addSound(unit, samples) {
    const now = performance.now();
    const turn = this.#turn;
    const ms = (1000 * samples.length) / SOUND_RATE;
    unit.firstSound ??= now - unit.sentAt;
    turn.record.first_sound_ms ??= unit.firstSound;
    this.stats.soundSeconds += ms / 1000;
    if (turn.cut || unit.number <= this.#dropThrough) {
      this.stats.droppedMs += ms;
      return;
    }
    turn.record.sound_ms += ms;
    this.#playoutDelay.add(turn.number, ms, now);
    this.#tune();
    this.#player.play(samples, turn.number);
  }

  #tune() {
    this.#player.tune(this.#playoutDelay.delayMs, this.#playoutDelay.lowMs);
  }

  #onStarted({ turn, waitedMs }) {
    const record = this.stats.turns[turn - 1];
    if (record && record.heard_ms === null) {
      record.waited_ms = waitedMs;
      record.heard_ms = (record.first_sound_ms ?? 0) + waitedMs;
    }
    if (this.isLive) this.#setState("speaking");
  }

  #onGap({ turn, samples, ms }) {
    const gap = { turn, samples, ms, unit: this.stats.units };
    this.stats.gaps.push(gap);
    this.#session?.report("gap", gap);
    this.#ui.gap(gap);
  }

  #onLevel({ rms, stretchedMs }) {
    this.stats.stretchedMs = stretchedMs;
    this.#ui.modelLevel(rms);
  }

  #onError(message) {
    this.stats.errors.push({ code: message.code ?? "internal", error: message.error });
    if ((!this.isLive && this.state !== "paused") || endsConversation(message.code)) {
      this.#fail(message.code, message.error);
      return;
    }
    if (replacesResult(message.code)) this.#waiting.shift();
    if (message.code !== "paused") this.#ui.error(message.code, message.error);
  }

  /** A message that cannot be parsed. Its unit is unknown, so later results could not be matched to their units. */
  #onUnreadable(error) {
    this.stats.errors.push({ code: "unreadable", error: String(error) });
    this.#fail("unreadable", String(error));
  }

  #onClosed({ opened }) {
    this.#session = null;
    if (!this.isOpen) return;
    this.#fail(opened ? "server_gone" : "server_unreachable", "");
  }

  // --- end -------------------------------------------------------------------------------------

  #fail(code, text) {
    if (!this.isOpen) return;
    this.#attempt += 1;
    const session = this.#session;
    this.#end("failed", { code: code ?? "internal", text });
    session?.close();
  }

  #end(state, details) {
    this.#session = null;
    this.#release(state);
    this.#setState(state, details);
    this.#ui.micLevel(0);
    this.#ui.modelLevel(0);
  }

  /** Silence playback at once and close all devices. */
  #release(reason) {
    const player = this.#player;
    const { flushes } = this.stats;
    player?.flush().then(
      ({ ms, lost }) => flushes.push({ ms, why: reason, lost_samples: lost }),
      () => {}, // the audio thread has ended, and its sound with it
    ).finally(() => player.close());
    this.#capture?.close();
    this.#capture = this.#player = null;
    this.#lock?.release();
    this.#lock = null;
    this.#camera.close();
  }

  #setState(state, details = {}) {
    this.state = state;
    this.#ui.state(state, details);
  }
}
