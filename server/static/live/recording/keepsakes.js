/** What the user can keep of a conversation: transcript, recording, link to the server's recording. */

import { download, stamp } from "../../shared/download.js";
import { showRecording } from "../view/badges.js";
import { transcriptText } from "../view/captions.js";
import { Recorder } from "./recorder.js";
import { openShare } from "./share.js";

export class Keepsakes {
  #conversation;
  #captions;
  #camera;
  #mode;
  #notice;
  #voiceOnly;
  #recorder = null;
  #blob = null; // the finished recording
  #recordingId = null;
  isLeaving = false; // the user has agreed to end the conversation

  constructor({ conversation, captions, camera, mode, notice, voiceOnly }) {
    this.#conversation = conversation;
    this.#captions = captions;
    this.#camera = camera;
    this.#mode = mode;
    this.#notice = notice;
    this.#voiceOnly = voiceOnly;
  }

  /** Id of the server's recording; null if the session is not recorded. */
  get recordingId() {
    return this.#recordingId;
  }

  set recordingId(id) {
    this.#recordingId = id;
    this.#show();
  }

  #show() {
    showRecording(this.#recordingId !== null && this.#conversation.isOpen, this.#recorder !== null);
  }

  /** Start or stop a recording in the browser. @returns {boolean} whether one runs now */
  toggleRecording() {
    const { sound } = this.#conversation;
    if (this.#recorder) this.#finish().then((blob) => download(blob, this.#name(suffixOf(blob))));
    else if (sound) this.#start(sound);
    this.#show();
    return this.#recorder !== null;
  }

  #start(sound) {
    const video = this.#voiceOnly ? null : this.#camera.video;
    try {
      const inputs = [sound.capture.mix, sound.player.output];
      this.#recorder = new Recorder(sound.context, inputs, { video, text: () => this.#captions.newest });
    } catch {
      this.#notice("record_failed");
    }
  }

  async #finish() {
    const recorder = this.#recorder;
    this.#recorder = null;
    this.#blob = await recorder.stop();
    return this.#blob;
  }

  /** The conversation is over: finish what runs. */
  async end() {
    const finished = this.#recorder && this.#finish();
    this.#show();
    await finished;
  }

  share() {
    openShare(this.#recordingId, this.#blob);
  }

  saveText() {
    download(new Blob([transcriptText(this.#captions.entries)], { type: "text/plain" }), this.#name("txt"));
  }

  saveJson() {
    const { stats } = this.#conversation;
    const body = { mode: this.#mode, recording_session_id: this.#recordingId, transcript: this.#captions.entries,
      statistics: stats.report() };
    download(new Blob([JSON.stringify(body, null, 1)], { type: "application/json" }), this.#name("json"));
  }

  #name(suffix) {
    return `duologue-${stamp()}.${suffix}`;
  }

  /** Buttons after the end. */
  get offers() {
    const offers = [];
    if (this.#captions.entries.length) offers.push({ key: "save_text", act: () => this.saveText() });
    if (this.#blob) offers.push({ key: "save_recording", act: () => download(this.#blob, this.#name(suffixOf(this.#blob))) });
    if (this.#recordingId) offers.push({ key: "share", act: () => this.share() });
    return offers;
  }
}

const suffixOf = (blob) => (blob.type.endsWith("mp4") ? "mp4" : "webm");
