/** Where pictures and further sound come from: camera, screen or a file, chosen before or during a conversation. */

import { byId } from "../../shared/dom.js";
import { setPlain, setText, t } from "../../shared/i18n.js";

export class Sources {
  #camera;
  #mixer;
  #conversation;
  #settings;
  #on;
  file = null; // chosen, to be played from the start of the conversation

  /** on: {notice(code), changed()} */
  constructor({ camera, mixer, conversation, settings }, on) {
    this.#camera = camera;
    this.#mixer = mixer;
    this.#conversation = conversation;
    this.#settings = settings;
    this.#on = on;
    camera.lost = (kind) => this.#onLost(kind);
    byId("source-file").onchange = ({ target }) => {
      if (target.files.length) this.useFile(target.files[0]);
      target.value = "";
    };
    byId("source-none").onclick = () => this.useFile(null);
  }

  /** Choose a file, or none. During a conversation it replaces the camera at once. @param {File|null} file */
  async useFile(file) {
    this.file = file;
    byId("source-none").hidden = !file;
    if (file) setPlain(byId("source-state"), t("source_chosen", { name: file.name }));
    else setPlain(byId("source-state"), "");
    if (!this.#conversation.isOpen) return;
    if (file) await this.#openFile();
    else await this.#backToCamera();
  }

  /** A conversation opened its sound: open the chosen file in place of the camera. */
  async open(sound) {
    this.#mixer.open(sound);
    if (this.file) await this.#openFile();
  }

  close() {
    this.#mixer.use(null);
    this.#mixer.close();
  }

  async #openFile() {
    try {
      await this.#camera.openFile(this.file);
      this.#mixer.use(this.#camera.fileSound(this.#conversation.sound.context));
      this.#camera.play(this.#conversation.isLive);
    } catch {
      this.file = null;
      setText(byId("source-state"), "source_bad");
      this.#on.notice("source_bad");
    }
    this.#on.changed();
  }

  async toggleScreen() {
    if (this.#camera.kind === "screen") {
      this.#camera.close();
      await this.#backToCamera();
      return;
    }
    try {
      const stream = await this.#camera.openScreen();
      const context = this.#conversation.sound?.context;
      const hasSound = context && stream?.getAudioTracks().length;
      this.#mixer.use(hasSound ? context.createMediaStreamSource(stream) : null);
    } catch (error) {
      if (error.name !== "NotAllowedError") this.#on.notice("screen_failed"); // otherwise the user changed their mind
    }
    if (!this.#conversation.isOpen) this.#camera.close();
    this.#on.changed();
  }

  async #backToCamera() {
    this.#mixer.use(null);
    if (this.#settings.values.cameraOn && this.#conversation.isOpen) await this.openCamera();
    else this.#camera.close();
    this.#on.changed();
  }

  /** Open a camera during a conversation, which continues without one if that fails. */
  async openCamera(open = () => this.#camera.open(this.#settings.values.camera)) {
    this.#mixer.use(null);
    try {
      await open();
    } catch (error) {
      this.#on.notice(error.name === "NotAllowedError" ? "camera_denied" : "camera_missing");
    }
    if (!this.#conversation.isOpen) this.#camera.close();
    this.#on.changed();
  }

  #onLost(kind) {
    if (kind === "file") {
      this.#mixer.use(null); // the microphone is heard again
      this.#on.notice("file_ended");
    } else if (kind === "screen") this.#backToCamera();
    else this.#on.notice("camera_lost");
    this.#on.changed();
  }
}
