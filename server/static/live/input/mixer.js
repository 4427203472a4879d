/** The sound that is sent: microphone, file and shared screen, each with its level; and a monitor for what is not heard. */

import { byId, make } from "../../shared/dom.js";
import { setText, t } from "../../shared/i18n.js";
import { Channel, SILENT_LUFS } from "../../shared/audio/channel.js";

const TRIM_DB = 12;
const LOUDEST_LUFS = -6;
const SOURCES = ["mic", "file"];

export class Mixer {
  #settings;
  #sound = null; // of the running conversation
  #file = null; // Channel of the file or the screen
  #source = null; // its AudioNode
  #monitor = null;

  /** @param {Settings} settings with trims {mic, file} in dB, monitor 0 to 1, micWithFile */
  constructor(settings) {
    this.#settings = settings;
    byId("mixer").append(...SOURCES.map((name) => this.#strip(name)), this.#monitorField(), this.#together());
    setInterval(() => byId("settings").open && this.#showLevels(), 200);
  }

  #strip(name) {
    const title = make("span", {});
    const words = make("span", {});
    setText(words, `mixer_${name}`);
    title.append(words, make("output", { id: `lufs-${name}` }, "–"));
    const trim = make("input", { type: "range", id: `trim-${name}`, min: -TRIM_DB, max: TRIM_DB, step: 1 });
    trim.value = this.#settings.values.trims[name];
    trim.oninput = () => {
      this.#settings.set({ trims: { ...this.#settings.values.trims, [name]: trim.valueAsNumber } });
      this.#apply();
    };
    const meter = make("meter", { id: `meter-${name}`, min: SILENT_LUFS, max: LOUDEST_LUFS, low: -45, high: -14, optimum: -25 });
    meter.setAttribute("aria-labelledby", `lufs-${name}`);
    return make("label", { class: "field strip", id: `strip-${name}` }, title, meter, trim);
  }

  #monitorField() {
    const title = make("span", {});
    setText(title, "monitor");
    const volume = make("input", { type: "range", id: "monitor", min: 0, max: 1, step: 0.05 });
    volume.value = this.#settings.values.monitor;
    volume.oninput = () => {
      this.#settings.set({ monitor: volume.valueAsNumber });
      this.#apply();
    };
    return make("label", { class: "field" }, title, volume);
  }

  #together() {
    const words = make("span", {});
    setText(words, "mic_with_file");
    const box = make("input", { type: "checkbox", id: "mic-with-file", checked: this.#settings.values.micWithFile });
    box.onchange = () => {
      this.#settings.set({ micWithFile: box.checked });
      this.#apply();
    };
    return make("label", { class: "check" }, box, words);
  }

  /** A conversation opened its sound. @param {Sound} sound */
  open(sound) {
    this.#sound = sound;
    this.#file = new Channel(sound.context);
    this.#file.connect(sound.capture.mix);
    this.#monitor = new GainNode(sound.context);
    this.#file.connect(this.#monitor);
    this.#monitor.connect(sound.context.destination);
    if (this.#source) this.#source.connect(this.#file.input);
    this.#apply();
  }

  close() {
    this.#source?.disconnect();
    this.#file?.close();
    this.#monitor?.disconnect();
    this.#sound = this.#file = this.#monitor = null;
  }

  /** The second source beside the microphone. @param {AudioNode|null} node of the conversation's context */
  use(node) {
    this.#source?.disconnect();
    this.#source = node;
    if (this.#file) node?.connect(this.#file.input);
    this.#apply();
  }

  #apply() {
    if (!this.#sound) return;
    const { trims, monitor, micWithFile } = this.#settings.values;
    this.#sound.capture.mic.trim = this.#source && !micWithFile ? -Infinity : trims.mic;
    this.#file.trim = trims.file;
    this.#monitor.gain.value = monitor;
  }

  #showLevels() {
    const levels = { mic: this.#sound?.capture.mic.lufs, file: this.#source && this.#file?.lufs };
    for (const [name, lufs] of Object.entries(levels)) {
      const known = lufs !== undefined && lufs !== null;
      byId(`lufs-${name}`).textContent = known && lufs > SILENT_LUFS ? t("lufs", { value: lufs.toFixed(0) }) : "–";
      byId(`meter-${name}`).value = known ? lufs : SILENT_LUFS;
    }
  }
}
