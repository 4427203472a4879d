/**
 * One conversation: sends microphone and pictures to the server, plays the model's turns, and keeps the state.
 *
 * Decides the order of permissions and connections and when to reconnect. Does not access the page; it calls `ui`.
 */

import { Capture } from "../../shared/audio/capture.js";
import { WakeLock } from "../../shared/wake-lock.js";
import { Backoff } from "./backoff.js";
import { closeErrorCode, endsConversation, isRetried, replacesResult, startErrorCode, timeoutCode } from "./errors.js";
import { InOrder } from "./in-order.js";
import { Inserts } from "./inserts.js";
import { Outgoing } from "./outgoing.js";
import { Session, newSessionId } from "./session.js";
import { Sound, makeContext } from "./sound.js";
import { Stats } from "./stats.js";
import { Turns } from "./turns.js";
import { Units } from "./units.js";

const PICTURE_TIMEOUT_MS = 80;
const DETAILED_SLICES = 2;
const LIVE = ["listening", "speaking"];
const STOPPED_BY_USER = ["interrupt", "barge_in"];

export class Conversation {
  #context = null;
  #session = null;
  #camera;
  #settings;
  #ui;
  #turns = null;
  #units = null;
  #backoff = new Backoff();
  #inserts = new Inserts();
  #retry = 0; // timer
  #wasLive = false;
  #kept = "listening"; // state that a resumed session returns to
  #screen = new WakeLock();
  #attempt = 0;
  #outgoing = new Outgoing();
  #sending = new InOrder(); // a message may wait for its picture when the next one comes
  sound = null; // Sound, from the permission to the end
  muted = false;
  forceListen = false;
  state = "idle";
  stats = new Stats();

  /**
   * @param {Camera} camera
   * @param {() => object} settings {mic, camera, speaker, volume, playbackDelayMs, prefix, wantsCamera, sendsPictures,
   *   bargeIn: {on, confirmMs}, prepare(): Promise<object>}
   * @param {object} ui state(name, details) caption(turn, text) turnEnded(turn, cut, heard) unit(result) gap(gap)
   *   micLevel(rms) modelLevel(rms) error(code, text) notice(code) opened(sound) adjusted(message)
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

  get sessionId() {
    return this.#session?.id ?? null;
  }

  /** Seconds since the oldest unit without an answer was sent; 0 if there is none. */
  get unansweredS() {
    return this.isLive ? this.#units.unansweredS : 0;
  }

  /** Start: permissions, connection, first unit. Call it from a click handler: browsers allow sound only then. */
  async start() {
    if (this.isOpen) return;
    const attempt = ++this.#attempt;
    this.stats = new Stats();
    this.#wasLive = false;
    this.#backoff.reset();
    this.#setState("asking");
    const settings = this.#settings();
    try {
      await this.#openSound(settings, attempt);
      if (settings.wantsCamera && attempt === this.#attempt) await this.#openCamera(settings, attempt);
      if (attempt === this.#attempt) await this.#connect(attempt); // otherwise stopped during the permission dialog
    } catch (error) {
      if (attempt === this.#attempt) this.#fail(startErrorCode(error), error.message);
    }
  }

  /** Open microphone and playback. Leaves nothing open if the attempt was stopped, as another may have started. */
  async #openSound(settings, attempt) {
    if (!navigator.mediaDevices) throw Object.assign(new Error(location.origin), { name: "InsecureContext" });
    // Created before the first await, while the call still counts as caused by the click.
    const context = (this.#context ??= makeContext(() => this.isOpen));
    const sound = await Sound.open(context, settings, {
      soon: () => this.#camera.snap(),
      unit: ({ samples, end }) => this.#sending.add(this.#sendUnit.bind(this, this.#session, samples, end)),
      level: ({ rms }) => this.#ui.micLevel(this.muted || this.state === "paused" ? 0 : rms),
      lost: () => this.isOpen && this.#fail("mic_lost", ""),
      started: (event) => this.#onStarted(event),
      ended: () => this.isLive && this.#setState("listening"),
      gap: (event) => this.#onGap(event),
      played: (event) => this.#onPlayed(event),
      speech: ({ ms }) => this.#bargeIn(ms),
      detected: () => this.watchVoice(),
      undetected: () => this.#ui.notice("barge_in_failed"),
    });
    if (attempt !== this.#attempt) {
      sound.close();
      return;
    }
    this.sound = sound;
    this.#turns = new Turns(this.stats, sound, this.#ui);
    this.#units = new Units(this.stats, this.#turns, this.#outgoing, sound.capture);
    sound.capture.mute(this.muted);
    this.#ui.opened(sound);
    await this.useSpeaker(settings.speaker);
  }

  async #openCamera(settings, attempt) {
    try {
      if (!this.#camera.isOn) await this.#camera.open(settings.camera);
    } catch (error) {
      if (attempt !== this.#attempt) return;
      this.#ui.notice(error.name === "NotAllowedError" ? "camera_denied" : "camera_missing");
    }
  }

  /** Open the socket. @throws {Error} if the settings are invalid */
  async #connect(attempt) {
    const settings = this.#settings();
    const prepare = await settings.prepare();
    if (attempt !== this.#attempt) return;
    this.#units.configure(prepare.config);
    this.#setState("connecting");
    this.#session = new Session(newSessionId(settings.prefix), prepare, {
      queued: (message) => this.#setState("queued", message),
      queue_update: (message) => this.#setState("queued", message),
      queue_done: () => this.#setState("preparing"),
      prepared: (message) => this.#onPrepared(message),
      partial: (message) => this.#units.takePartial(message),
      result: (message) => this.#onResult(message),
      paused: (message) => this.state === "paused" && this.#setState("paused", message),
      adjusted: (message) => this.#ui.adjusted(message),
      text_inserted: () => this.#inserts.accept(),
      session_moving: ({ reason }) => this.#ui.notice(this.#units.waitForWorker(reason)),
      session_moved: ({ dropped }) => this.#ui.notice(dropped ? "moved_without" : "moved"),
      timeout: (message) => this.#fail(timeoutCode(message, this.state), ""),
      error: (message) => this.#onError(message),
      unreadable: (error) => this.#onUnreadable(String(error)),
      lost: ({ delayS }) => this.#keep({ code: "server_gone", delayS, isKept: true }),
      resumed: () => this.#keep(),
      closed: (event) => this.#lose(closeErrorCode(event), ""),
    });
  }

  // --- sending ---------------------------------------------------------------------------------

  async #sendUnit(session, samples, end) {
    if (!this.isLive || session !== this.#session) return;
    const due = this.#outgoing.next(samples.length);
    if (due.snap) this.#camera.snap();
    const seen = due.picture && this.#settings().sendsPictures ? await this.#camera.picture(PICTURE_TIMEOUT_MS) : null;
    if (!this.isLive || session !== this.#session) return;
    const shown = due.picture ? this.#inserts.takePicture() : null;
    const picture = shown ?? seen;
    const fields = this.#outgoing.demands(this.forceListen);
    if (picture && (shown || this.#camera.detailed)) fields.max_slice_nums = DETAILED_SLICES;
    if (!session.sendUnit(samples, picture ? [picture] : [], fields)) return;
    this.#units.add(samples, end, fields);
    if (this.#units.isOverdue) this.#lose("no_answer", "");
  }

  /**
   * Tell the model a written text, which it answers at once unless it only listens, and show it pictures.
   * @param {string} text may be empty @param {Uint8Array[]} pictures JPEG
   * @returns {Promise<string|null>} code of the refusal; null: the text is in the context
   */
  async tell(text, pictures) {
    if (!this.isLive && this.state !== "paused") return "not_sent";
    this.#inserts.show(pictures);
    if (!text) return null;
    this.#session.send({ type: "insert_text", text, role: "user" });
    const refusal = await this.#inserts.addText();
    if (refusal === null) this.#outgoing.speakOnce();
    return refusal;
  }

  /** Interrupt the current turn, here at once and at the server. Resolves when playback is silent. */
  async interrupt() {
    if (!this.isLive) return;
    this.#session.send({ type: "interrupt" });
    this.#turns.cut();
    await this.#flush("interrupt");
  }

  /** The user has spoken for `ms` while the model was speaking: as `interrupt`, and the next unit listens. */
  async #bargeIn(ms) {
    if (this.state !== "speaking") return;
    this.#outgoing.listenOnce();
    this.#session.send({ type: "interrupt" });
    this.#turns.cut();
    await this.#flush("barge_in", { speech_ms: ms });
  }

  /** Apply the settings of barge-in and whether the model speaks. */
  watchVoice() {
    this.sound?.watchVoice({ ...this.#settings().bargeIn, active: this.state === "speaking" });
  }

  async pause() {
    if (!this.isLive) return;
    this.sound.capture.run(false);
    this.#camera.play(false);
    this.#session.send({ type: "pause" });
    this.#setState("paused");
    this.#ui.micLevel(0);
    this.#ui.modelLevel(0);
    await this.#flush("pause");
  }

  resume() {
    if (this.state !== "paused") return;
    this.#session.send({ type: "resume" });
    this.#setState("listening");
    this.#camera.play(true);
    this.sound.capture.run(true);
  }

  stop() {
    if (!this.isOpen) return;
    this.#attempt += 1;
    if (this.stats.units) this.#session?.report("session_summary", this.stats.summary());
    this.#session?.stop();
    this.#end("ended");
  }

  mute(muted) {
    this.muted = muted;
    this.sound?.capture.mute(muted);
  }

  /** Change settings of the running conversation. @param {object} fields of `adjust` */
  adjust(fields) {
    if (!this.isLive && this.state !== "paused") return;
    if (fields.config?.early_unit) this.#units.configure(fields.config);
    this.#session.send({ type: "adjust", ...fields });
  }

  async useMicrophone(deviceId) {
    const capture = this.sound?.capture;
    capture?.use(await Capture.open(deviceId)); // stops the stream if the conversation has ended meanwhile
    this.watchVoice();
  }

  async useSpeaker(deviceId) {
    if (!this.#context?.setSinkId) return;
    await this.#context.setSinkId(deviceId).catch(() => this.#ui.notice("speaker_missing"));
  }

  async #flush(reason, facts = {}) {
    this.#turns.dropThrough(this.stats.units);
    const { stats, sound } = this;
    const turns = this.#turns;
    const session = this.#session;
    const { ms, lost, playing } = await sound.player.flush();
    stats.flushes.push({ ms, why: reason, lost_samples: lost, at: performance.now(), ...facts });
    if (playing && STOPPED_BY_USER.includes(reason)) session.report(reason, { ...facts, ...turns.stamp(playing) });
    if (this.isLive && sound === this.sound) this.#setState("listening");
  }

  // --- receiving -------------------------------------------------------------------------------

  #onPrepared(message) {
    const again = this.#wasLive;
    this.#wasLive = true;
    this.#setState("listening", { notes: message.notes ?? [], recording: message.recording_session_id ?? null, again });
    this.#camera.play(true);
    this.sound.capture.run(true);
    this.#screen.hold();
  }

  #onResult(message) {
    const result = this.#units.takeResult(message);
    if (!result) return;
    this.#backoff.reset();
    this.#ui.unit(result);
  }

  #onStarted(event) {
    this.#turns.started(event);
    if (this.isLive) this.#setState("speaking");
  }

  #onGap({ turn, samples, ms }) {
    const gap = { turn, samples, ms, unit: this.stats.units };
    this.stats.gaps.push(gap);
    this.#session?.report("gap", gap);
    this.#ui.gap(gap);
  }

  #onPlayed({ rms, stretchedMs }) {
    this.stats.stretchedMs = stretchedMs;
    if (this.isLive) this.#ui.modelLevel(rms);
  }

  #onError(message) {
    this.stats.errors.push({ code: message.code ?? "internal", error: message.error });
    if (this.#inserts.refuse(message)) return;
    if ((!this.isLive && this.state !== "paused") || endsConversation(message.code)) {
      this.#lose(message.code, message.error);
      return;
    }
    if (replacesResult(message)) this.#units.skip();
    if (message.code !== "paused") this.#ui.error(message.code, message.error);
  }

  /** A message that cannot be parsed: later results could not be matched to their units. */
  #onUnreadable(error) {
    this.stats.errors.push({ code: "unreadable", error });
    this.#fail("unreadable", error);
  }

  // --- end -------------------------------------------------------------------------------------

  /** The connection is lost: reconnect later if that makes sense, with a new context. */
  #lose(code, text) {
    if (!this.isOpen) return;
    const delayS = this.#wasLive && this.state !== "paused" && isRetried(code) ? this.#backoff.next() : null;
    if (delayS === null) {
      this.#fail(code, text);
      return;
    }
    this.#drop();
    this.sound.capture.run(false);
    this.#camera.play(false);
    this.#units.clear();
    this.#inserts.clear();
    this.#turns.abandon();
    this.#setState("reconnecting", { code, delayS });
    this.#flush("lost").catch(() => {}); // the audio thread has ended, and its sound with it
    const attempt = this.#attempt;
    this.#retry = setTimeout(() => attempt === this.#attempt && this.reconnect(), 1000 * delayS);
  }

  /** The session is kept after a lost connection. @param {object} [details] of the wait; none: the session goes on */
  #keep(details) {
    if (this.state !== "reconnecting") this.#kept = this.state === "paused" ? "paused" : "listening";
    const state = details ? "reconnecting" : this.#kept;
    this.sound.capture.run(state === "listening");
    this.#setState(state, details);
  }

  reconnect() {
    clearTimeout(this.#retry);
    if (this.state !== "reconnecting" || this.#session?.retry()) return;
    this.#connect(this.#attempt).catch((error) => this.#fail(startErrorCode(error), error.message));
  }

  #fail(code, text) {
    if (!this.isOpen) return;
    this.#attempt += 1;
    this.#end("failed", { code: code ?? "internal", text });
  }

  /** Close the socket. Nothing of it is received any more. */
  #drop() {
    this.#session?.close();
    this.#session = null;
  }

  /** Close the socket and all devices. */
  #end(state, details) {
    clearTimeout(this.#retry);
    if (state === "ended") this.#session = null; // closes itself after the server's answer
    else this.#drop();
    const { flushes } = this.stats;
    this.#turns?.abandon();
    this.#inserts.clear();
    this.sound?.close().then((flush) => flush && flushes.push({ ms: flush.ms, why: state, lost_samples: flush.lost }));
    this.sound = this.#turns = null;
    this.#screen.release();
    this.#camera.close();
    this.#setState(state, details);
    this.#ui.micLevel(0);
    this.#ui.modelLevel(0);
  }

  #setState(state, details = {}) {
    this.state = state;
    this.watchVoice();
    this.#ui.state(state, details);
  }
}
