/**
 * One conversation: microphone and camera to the server, its turns to the speaker, every state in between.
 *
 * Knows the order of things: who is asked first, which sound belongs to which turn, what is dropped after a cut. Does
 * not know the page; it tells `ui` what happens.
 */

import { Capture } from "./capture.js";
import { Cushion } from "./cushion.js";
import { Player } from "./player.js";
import { Session, newSessionId } from "./session.js";
import { Stats } from "./stats.js";
import { endsConversation, standsForUnit, timeoutTrouble, troubleOf } from "./trouble.js";

const SOUND_RATE = 24000;
const PICTURE_PATIENCE_MS = 80;
const MOST_UNANSWERED = 20; // seconds behind which nobody is listening any more
const LIVE = ["listening", "speaking"];

export class Conversation {
  #context = null;
  #capture = null;
  #player = null;
  #session = null;
  #camera;
  #settings;
  #ui;
  #cushion = null;
  #waiting = []; // units sent and not answered: {number, sentAt, firstSound}
  #turn = null; // the open one: {number, cut, record}
  #lastTurn = 0;
  #dropThrough = 0; // sound of units up to this one is not wanted any more
  #lock = null;
  #attempt = 0;
  muted = false;
  forceListen = false;
  state = "idle";
  stats = new Stats();

  /**
   * @param {import("./camera.js").Camera} camera
   * @param {() => object} settings {mic, speaker, playbackDelayMs, detailed, prefix, wantsCamera, prepare(): object}
   * @param {object} ui state(name, details) caption(turn, unit, text) turnOver(turn, cut) unit(result) gap(gap)
   *   micLevel(rms) modelLevel(rms) trouble(code, text) notice(code)
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

  /** Everything from permission to the first unit. Call it from a click: browsers allow sound only then. */
  async start() {
    if (this.isOpen) return;
    const attempt = ++this.#attempt;
    this.#reset();
    this.#become("asking");
    const settings = this.#settings();
    try {
      await this.#openSound(settings, attempt);
      if (settings.wantsCamera && attempt === this.#attempt) await this.#openCamera(settings, attempt);
      if (attempt !== this.#attempt) return; // stopped while the browser was asking
      const prepare = await settings.prepare();
      if (attempt === this.#attempt) this.#connect(settings, prepare);
    } catch (error) {
      if (attempt === this.#attempt) this.#fail(troubleOf(error), error.message);
    }
  }

  #reset() {
    this.stats = new Stats();
    this.#waiting = [];
    this.#turn = null;
    this.#lastTurn = this.#dropThrough = 0;
  }

  /** Leaves nothing open if the attempt is over by the time the browser answers: another one may be under way. */
  async #openSound(settings, attempt) {
    if (!navigator.mediaDevices) throw Object.assign(new Error(location.origin), { name: "InsecureContext" });
    // Made before anything is waited for, while the click still counts.
    const context = (this.#context ??= this.#makeContext());
    const [stream] = await Promise.all([Capture.open(settings.mic), context.resume()]);
    try {
      await Promise.all([Capture.load(context), Player.load(context)]);
    } catch (error) {
      Capture.letGo(stream);
      throw error;
    }
    if (attempt !== this.#attempt) {
      Capture.letGo(stream);
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
      ended: () => this.isLive && this.#become("listening"),
      gap: (event) => this.#onGap(event),
      level: (event) => this.#onLevel(event),
    });
    this.#cushion = new Cushion(settings.playbackDelayMs);
    this.#tune();
    await this.useSpeaker(settings.speaker);
  }

  #makeContext() {
    const context = new AudioContext({ latencyHint: "interactive" });
    // A phone call stops it; without it no second is full.
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
    this.#become("connecting");
    this.#session = new Session(newSessionId(settings.prefix), prepare, {
      queued: (message) => this.#become("queued", message),
      queue_update: (message) => this.#become("queued", message),
      queue_done: () => this.#become("preparing"),
      prepared: (message) => this.#onPrepared(message),
      partial: (message) => this.#onPartial(message),
      result: (message) => this.#onResult(message),
      paused: (message) => this.state === "paused" && this.#become("paused", message),
      stopped: () => this.#session?.close(),
      timeout: (message) => this.#fail(timeoutTrouble(message, this.state), ""),
      error: (message) => this.#onError(message),
      unreadable: (error) => this.#onUnreadable(error),
      closed: (event) => this.#onClosed(event),
    });
  }

  // --- what goes out ---------------------------------------------------------------------------

  async #sendUnit(samples) {
    if (!this.isLive) return;
    const session = this.#session;
    const picture = await this.#camera.picture(PICTURE_PATIENCE_MS);
    if (!this.isLive || session !== this.#session) return;
    const fields = this.forceListen ? { force_listen: true } : {};
    if (!session.sendUnit(samples, picture ? [picture] : [], fields)) return;
    this.stats.units += 1;
    this.#waiting.push({ number: this.stats.units, sentAt: performance.now(), firstSound: null });
    if (this.#waiting.length > MOST_UNANSWERED) this.#fail("no_answer", "");
  }

  /** Cut what is being said, here at once and at the server. Resolves when the speaker is silent. */
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
    this.#become("paused");
    await this.#flush("pause");
  }

  resume() {
    if (this.state !== "paused") return;
    this.#session.send({ type: "resume" });
    this.#become("listening");
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
    capture?.use(await Capture.open(deviceId)); // one that is closed by then lets it go
  }

  async useSpeaker(deviceId) {
    if (!this.#context?.setSinkId) return;
    await this.#context.setSinkId(deviceId).catch(() => this.#ui.notice("speaker_missing"));
  }

  #cut() {
    this.#turn.cut = true;
    this.#turn.record.cut = true;
    this.#ui.turnOver(this.#turn.number, true);
  }

  async #flush(why) {
    this.#dropThrough = this.stats.units;
    const { ms, lost } = await this.#player.flush();
    this.stats.flushes.push({ ms, why, lost_samples: lost });
    if (this.isLive) this.#become("listening");
  }

  // --- what comes in ---------------------------------------------------------------------------

  #onPrepared(message) {
    this.#become("listening", { notes: message.notes ?? [] });
    this.#capture.run(true);
    navigator.wakeLock?.request("screen").then(
      (lock) => (this.isOpen ? (this.#lock = lock) : lock.release()),
      () => {}, // a convenience; browsers refuse it on low battery
    );
  }

  #onPartial(message) {
    const unit = this.#waiting[0];
    if (!unit) return;
    this.#openTurn();
    if (message.text) this.#say(unit, message.text);
    if (message.sound) this.#hear(unit, message.sound);
  }

  #onResult(message) {
    const unit = this.#waiting.shift();
    if (!unit) return;
    const now = performance.now();
    if (!message.is_listen) this.#openTurn();
    if (message.sound) this.#hear(unit, message.sound);
    if (message.text && !unit.text) this.#say(unit, message.text);
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
    if (!cut) this.#ui.turnOver(number, false);
  }

  #say(unit, text) {
    unit.text = (unit.text ?? "") + text;
    if (this.#turn.cut) return;
    this.#turn.record.text += text;
    this.#ui.caption(this.#turn.number, text);
  }

  #hear(unit, samples) {
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
    this.#cushion.heard(turn.number, ms, now);
    this.#tune();
    this.#player.play(samples, turn.number);
  }

  #tune() {
    this.#player.tune(this.#cushion.delayMs, this.#cushion.lowMs);
  }

  #onStarted({ turn, waitedMs }) {
    const record = this.stats.turns[turn - 1];
    if (record && record.heard_ms === null) {
      record.waited_ms = waitedMs;
      record.heard_ms = (record.first_sound_ms ?? 0) + waitedMs;
    }
    if (this.isLive) this.#become("speaking");
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
    if (standsForUnit(message.code)) this.#waiting.shift();
    if (message.code !== "paused") this.#ui.trouble(message.code, message.error);
  }

  /** Nobody knows which second it was about, so no later answer could be counted for the right one. */
  #onUnreadable(error) {
    this.stats.errors.push({ code: "unreadable", error: String(error) });
    this.#fail("unreadable", String(error));
  }

  #onClosed({ opened }) {
    this.#session = null;
    if (!this.isOpen) return;
    this.#fail(opened ? "server_gone" : "server_unreachable", "");
  }

  // --- ends ------------------------------------------------------------------------------------

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
    this.#become(state, details);
    this.#ui.micLevel(0);
    this.#ui.modelLevel(0);
  }

  /** Silence at once, devices let go. */
  #release(why) {
    const player = this.#player;
    const { flushes } = this.stats;
    player?.flush().then(
      ({ ms, lost }) => flushes.push({ ms, why, lost_samples: lost }),
      () => {}, // the audio thread is gone, and its sound with it
    ).finally(() => player.close());
    this.#capture?.close();
    this.#capture = this.#player = null;
    this.#lock?.release();
    this.#lock = null;
    this.#camera.close();
  }

  #become(state, details = {}) {
    this.state = state;
    this.#ui.state(state, details);
  }
}
