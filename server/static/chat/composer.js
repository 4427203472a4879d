/** The composer: text, attached files by choice, drop or paste, and sound from the microphone. */

import { attachmentOf, viewOf } from "./attachments.js";
import { byId, icon, make, setIcon } from "../shared/dom.js";
import { clock, label, t } from "../shared/i18n.js";

const HOLD_MS = 250; // of the space bar, until sound is recorded
const COARSE = matchMedia("(pointer: coarse)"); // Enter is a line break on touch keyboards

export class Composer {
  #attachments = [];
  #recorder = null;
  #on;

  /** on: send({text, attachments}), notice(text) */
  constructor(on) {
    this.#on = on;
    byId("text").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || COARSE.matches) return;
      event.preventDefault();
      this.submit();
    });
    byId("text").addEventListener("input", () => this.#fit());
    byId("text").addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.attach(event.clipboardData.files);
    });
    byId("send").onclick = () => this.submit();
    byId("attach").onclick = () => byId("file").click();
    byId("file").onchange = async ({ target }) => {
      await this.attach([...target.files]);
      target.value = "";
    };
    byId("record").onclick = () => this.#toggleRecording();
    this.#recordWhileHeld();
    for (const kind of ["dragover", "dragleave", "drop"]) addEventListener(kind, (event) => this.#onDrag(event));
  }

  #onDrag(event) {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    byId("composer").classList.toggle("target", event.type === "dragover");
    if (event.type === "drop") this.attach([...event.dataTransfer.files]);
  }

  /** @param {Iterable<File>} files */
  async attach(files) {
    for (const file of files) {
      try {
        this.#attachments.push(await attachmentOf(file));
      } catch (error) {
        this.#on.notice(error.message);
      }
    }
    this.#draw();
  }

  #draw() {
    byId("attached").replaceChildren(...this.#attachments.map((one, i) => {
      const remove = make("button", { type: "button", class: "quiet icon", title: t("remove", { name: one.name }), "aria-label": t("remove", { name: one.name }) }, icon("close"));
      remove.onclick = () => {
        this.#attachments.splice(i, 1);
        this.#draw();
        byId("text").focus();
      };
      return make("li", { class: one.kind }, viewOf(one), make("span", {}, one.name), remove);
    }));
  }

  #fit() {
    const area = byId("text");
    area.style.height = "auto";
    area.style.height = `${area.scrollHeight + 2}px`;
  }

  submit() {
    const text = byId("text").value.trim();
    if (!text && !this.#attachments.length) return;
    if (this.#on.send({ text, attachments: this.#attachments })) this.fill({ text: "", attachments: [] });
  }

  /** Replace what is composed. @param {{text: string, attachments: object[]}} message */
  fill({ text, attachments }) {
    byId("text").value = text;
    this.#attachments = [...attachments];
    this.#draw();
    this.#fit();
  }

  /** Record while the space bar is held, where it would type nothing of use. */
  #recordWhileHeld() {
    let timer = 0;
    let isHeld = false;
    addEventListener("keydown", (event) => {
      const { target } = event;
      const isFree = target === document.body || (target === byId("text") && !target.value);
      if (event.key !== " " || event.ctrlKey || event.altKey || event.metaKey || event.isComposing || !isFree) return;
      event.preventDefault();
      if (event.repeat || isHeld || this.#recorder) return;
      isHeld = true;
      timer = setTimeout(() => this.#startRecording(() => isHeld), HOLD_MS);
    });
    const release = () => {
      if (!isHeld) return;
      isHeld = false;
      clearTimeout(timer);
      this.#recorder?.stop();
    };
    addEventListener("keyup", ({ key }) => key === " " && release());
    addEventListener("blur", release);
  }

  #toggleRecording() {
    if (this.#recorder) this.#recorder.stop();
    else this.#startRecording(() => true);
  }

  /** @param {() => boolean} isWanted whether to record still, after the permission */
  async #startRecording(isWanted) {
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    } catch {
      this.#on.notice(t("mic_refused"));
      return;
    }
    if (!isWanted()) {
      for (const track of stream.getTracks()) track.stop();
      return;
    }
    const recorder = (this.#recorder = new MediaRecorder(stream));
    const parts = [];
    const begin = performance.now();
    const ticking = setInterval(() => this.#showSeconds((performance.now() - begin) / 1000), 500);
    recorder.ondataavailable = ({ data }) => parts.push(data);
    recorder.onstop = () => {
      clearInterval(ticking);
      for (const track of stream.getTracks()) track.stop();
      this.#recorder = null;
      this.#showRecording(false);
      const name = t("recording_name", { length: clock((performance.now() - begin) / 1000) });
      this.attach([new File(parts, name, { type: recorder.mimeType.split(";")[0] })]);
    };
    recorder.start();
    this.#showRecording(true);
  }

  #showRecording(on) {
    byId("record").setAttribute("aria-pressed", on);
    setIcon(byId("record"), on ? "mic-off" : "mic");
    label(byId("record"), on ? "record_stop" : "record_start");
    this.#showSeconds(null);
  }

  #showSeconds(seconds) {
    byId("record-time").textContent = seconds === null ? "" : clock(seconds);
  }
}
