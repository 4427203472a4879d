/** A half-duplex conversation: microphone, socket, speech and the state that follows from them. */

import { Capture } from "../shared/audio/capture.js";
import { Player } from "../shared/audio/player.js";
import { Speaker } from "../shared/audio/speaker.js";
import { StereoRecorder } from "../shared/audio/stereo-recorder.js";
import { decodeMessage, soundText } from "../shared/audio/wire.js";
import { newSessionId, socketUrl } from "../shared/socket.js";
import { WakeLock } from "../shared/wake-lock.js";

const CHUNK = 8000; // samples: half a second
const STOP_TIMEOUT_MS = 1500; // for the server's `stopped`
const OVER = ["idle", "ended"];

export class Conversation {
  #prepare;
  #on;
  #context = null;
  #capture = null;
  #speaker = null;
  #recorder = null;
  #socket = null;
  #answering = false; // between `generating` and `turn_done`
  #hearsDuringAnswers = false; // barge-in
  #wakeLock = new WakeLock();
  state = "idle"; // idle, opening, queued, preparing, listening, hearing, thinking, speaking, ended
  turns = []; // {heardMs, text, isOpen, stopped}
  sound = null; // of the conversation that has ended: WAV, the user left, the answers right
  endsAt = null; // ms of performance.now(), when the session ends

  /**
   * @param {() => Promise<object>} prepare fields of the message, before each start
   * @param {object} on mic(): id of the microphone, state(state, details), level(rms), turn(index), recorded(id), failed(code, text)
   */
  constructor(prepare, on) {
    this.#prepare = prepare;
    this.#on = on;
  }

  get isOpen() {
    return !OVER.includes(this.state);
  }

  get isLive() {
    return ["listening", "hearing", "thinking", "speaking"].includes(this.state);
  }

  #show(state, details) {
    this.state = state;
    this.#on.state(state, details);
  }

  async start() {
    this.turns = [];
    this.sound = this.endsAt = null;
    this.#answering = false;
    this.#show("opening");
    const context = (this.#context = new AudioContext({ latencyHint: "interactive" }));
    let stream;
    try {
      [stream] = await Promise.all([Capture.open(this.#on.mic()), context.resume(), Capture.load(context), Player.load(context),
        StereoRecorder.load(context)]);
    } catch {
      this.#finish("mic_refused", "");
      return;
    }
    if (context !== this.#context) {
      Capture.stop(stream); // ended meanwhile
      return;
    }
    this.#capture = new Capture(context, {
      unit: ({ samples }) => this.#send(samples),
      level: ({ rms }) => this.#on.level(this.isLive ? rms : 0),
      lost: () => this.#finish("mic_refused", ""),
    }, CHUNK);
    this.#capture.use(stream);
    this.#speaker = new Speaker(context, { changed: () => this.#follow() });
    let fields;
    try {
      fields = await this.#prepare();
    } catch (error) {
      this.#finish("", error.message);
      return;
    }
    if (context !== this.#context) return;
    this.#hearsDuringAnswers = fields.config?.vad?.barge_in ?? false;
    this.#connect(fields);
    this.#wakeLock.hold();
  }

  #connect(fields) {
    const socket = (this.#socket = new WebSocket(socketUrl(`/ws/half_duplex/${newSessionId("hdx_")}`)));
    let opened = false;
    let failure = "";
    const on = {
      queued: (place) => this.#show("queued", place),
      queue_update: (place) => this.#show("queued", place),
      queue_done: () => {
        this.#show("preparing");
        socket.send(JSON.stringify({ type: "prepare", ...fields }));
      },
      prepared: ({ timeout_s: seconds, recording_session_id: id }) => {
        this.endsAt = performance.now() + 1000 * seconds;
        this.#capture.run(true);
        this.#recorder = new StereoRecorder(this.#context, this.#capture.mic, this.#speaker.output);
        this.#show("listening");
        if (id) this.#on.recorded(id);
      },
      vad_state: ({ speaking }) => this.#show(speaking ? "hearing" : "listening"),
      generating: ({ speech_duration_ms: heardMs }) => this.#beginTurn(heardMs),
      chunk: (part) => this.#add(part),
      interrupted: () => this.#speaker.silence(),
      turn_done: (turn) => this.#endTurn(turn),
      timeout: ({ reason }) => this.#finish("timeout", reason),
      stopped: () => this.#finish("", ""),
      error: ({ error }) => {
        failure = error;
        this.#on.failed("", error);
      },
    };
    socket.onopen = () => (opened = true);
    socket.onmessage = ({ data }) => {
      if (socket !== this.#socket) return;
      const message = decodeMessage(data, "base64");
      on[message.type]?.(message);
    };
    socket.onclose = () => {
      if (socket !== this.#socket) return;
      this.#finish(failure ? "" : opened ? "connection_lost" : "connection_refused", failure);
    };
  }

  #send(samples) {
    const isDeaf = !this.#hearsDuringAnswers && (this.#answering || this.#speaker.isPlaying);
    if (isDeaf || this.#socket?.readyState !== WebSocket.OPEN) return;
    this.#socket.send(JSON.stringify({ type: "audio_chunk", audio_base64: soundText(samples) }));
  }

  #beginTurn(heardMs) {
    this.#answering = true;
    this.#speaker.begin();
    this.turns.push({ heardMs, text: "", isOpen: true });
    this.#on.turn(this.turns.length - 1);
    this.#show("thinking");
  }

  #add({ text_delta: text, sound }) {
    const turn = this.turns.at(-1);
    if (!turn) return;
    if (text) {
      turn.text += text;
      this.#on.turn(this.turns.length - 1);
    }
    if (!sound) return;
    this.#speaker.add(sound);
    if (this.state === "thinking") this.#show("speaking");
  }

  #endTurn({ text, stopped }) {
    this.#answering = false;
    const turn = this.turns.at(-1);
    Object.assign(turn, { text, stopped, isOpen: false });
    this.#speaker.end();
    this.#on.turn(this.turns.length - 1);
    this.#follow();
  }

  /** After the answer and its speech: listening again. */
  #follow() {
    if (this.#answering || this.#speaker.isPlaying) return;
    if (["thinking", "speaking"].includes(this.state)) this.#show("listening");
  }

  /** Stop the answer; the conversation goes on. */
  interrupt() {
    this.#speaker?.silence();
    if (this.#answering) this.#socket.send(JSON.stringify({ type: "interrupt" }));
    else this.#follow();
  }

  mute(muted) {
    this.#capture?.mute(muted);
  }

  /** End the conversation. */
  stop() {
    const socket = this.#socket;
    if (this.isLive && socket?.readyState === WebSocket.OPEN) {
      socket.send(JSON.stringify({ type: "stop" }));
      setTimeout(() => socket.close(), STOP_TIMEOUT_MS);
      this.#socket = null; // what still arrives is ignored
      socket.onmessage = ({ data }) => data.includes('"stopped"') && socket.close();
    }
    this.#finish("", "");
  }

  #finish(code, text) {
    if (!this.isOpen) return;
    this.state = "ended";
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
    this.sound = this.#recorder?.close() ?? null;
    this.#speaker?.close();
    this.#capture?.close();
    this.#context?.close();
    this.#recorder = this.#speaker = this.#capture = this.#context = null;
    this.#wakeLock.release();
    const turn = this.turns.at(-1);
    if (turn?.isOpen) {
      Object.assign(turn, { isOpen: false, stopped: "interrupted" });
      this.#on.turn(this.turns.length - 1);
    }
    this.endsAt = null;
    this.#on.level(0);
    this.#show("ended");
    if (code || text) this.#on.failed(code, text);
  }
}
