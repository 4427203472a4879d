/** The choice of preset, instructions and voice, and the system message that follows from them. */

import { fetchJson } from "../api.js";
import * as voices from "../audio/voices.js";
import { fillSelect, make } from "../dom.js";
import { language, onLanguage, setPlain, setText, t, translate } from "../i18n.js";
import { SystemItems } from "./system-items.js";

const VOICES = "/api/assets/ref_audio";
const field = (key, control) => make("label", { class: "field" }, make("span", { "data-text": key }), control);

export class Character {
  #settings;
  #mode;
  #presets = [];
  #registered = [];
  #select = make("select", { id: "set-preset" });
  #about = make("p", { class: "help" });
  #prompt = make("textarea", { id: "set-prompt", rows: 4, maxlength: 8000 });
  #voice = make("select", { id: "set-voice" });
  #state = make("p", { class: "help", role: "status" });
  #file = make("input", { type: "file", id: "voice-file", accept: "audio/*,video/*" });
  #record = make("button", { type: "button", class: "button", "data-text": "voice_record" });
  #own;
  #simple; // instructions and voice
  #detailed; // place of `#items`
  #items;
  #toggle = make("button", { type: "button", class: "button", id: "items-toggle" });

  /**
   * @param {HTMLElement} root the controls are appended to it
   * @param {Settings} settings with preset, prompt, voice, and byItem: whether the items are edited one by one
   * @param {string} mode of the presets @param {string[]} kinds of items of the system message
   */
  constructor(root, settings, mode, kinds) {
    this.#settings = settings;
    this.#mode = mode;
    const play = make("button", { type: "button", class: "button", id: "voice-play", "data-text": "voice_play", onclick: () => this.#play() });
    this.#own = make("div", { class: "row" },
      make("label", { class: "button" }, make("span", { "data-text": "voice_upload" }), this.#file), this.#record);
    this.#simple = make("div", {}, field("prompt", this.#prompt), field("voice", this.#voice), this.#own, this.#state,
      make("div", { class: "row" }, play));
    this.#detailed = make("div", { id: "items", hidden: true });
    this.#items = new SystemItems(this.#detailed, mode, kinds);
    root.append(field("preset", this.#select), this.#about, this.#simple, this.#detailed,
      make("div", { class: "row" }, this.#toggle));
    translate(root);
    this.#select.onchange = async () => {
      this.#choose(this.#select.value);
      if (settings.values.byItem && this.#preset) await this.#fillItems();
    };
    this.#toggle.onclick = async () => {
      const byItem = !settings.values.byItem;
      if (byItem) await this.#fillItems();
      settings.set({ byItem });
      this.refresh();
    };
    this.#prompt.onchange = () => settings.set({ prompt: this.#prompt.value });
    this.#voice.onchange = () => {
      settings.set({ voice: this.#voice.value });
      this.refresh();
    };
    this.#file.onchange = () => this.#file.files.length && this.#keep(this.#file.files[0].name, this.#file.files[0]);
    this.#record.onclick = () => this.#recordVoice();
    onLanguage(() => this.refresh());
  }

  /** Fetch presets and registered voices. Without a stored choice the first preset of the language is chosen. */
  async load() {
    const listed = fetchJson(VOICES).then((body) => body.ref_audios, () => []);
    const loads = [voices.fetchPresets(this.#mode), listed, this.#items.load()];
    [this.#presets, this.#registered] = await Promise.all(loads);
    const first = this.#presets.find((one) => !one.lang || one.lang === language());
    if (this.#settings.values.preset === null && first) this.#choose(first.id);
    this.refresh();
  }

  get #preset() {
    return this.#presets.find((one) => one.id === this.#settings.values.preset);
  }

  #choose(id) {
    const preset = this.#presets.find((one) => one.id === id);
    const { voice } = this.#settings.values;
    const kept = voice === "preset" ? "default" : voice;
    this.#settings.set({ preset: id, voice: preset && hasVoice(preset) ? "preset" : kept, ...(preset && { prompt: partsOf(preset).prompt }) });
    this.refresh();
  }

  /** Show the choice. */
  refresh() {
    const { preset, prompt, voice, byItem } = this.#settings.values;
    this.#simple.hidden = byItem;
    this.#detailed.hidden = !byItem;
    setText(this.#toggle, byItem ? "items_close" : "items_open");
    fillSelect(this.#select, [["", t("preset_none")], ...this.#presets.map((one) => [one.id, one.name])], preset ?? "");
    setPlain(this.#about, this.#preset?.description ?? "");
    this.#prompt.value = prompt;
    fillSelect(this.#voice, [
      ["default", t("voice_default")],
      ...(this.#preset && hasVoice(this.#preset) ? [["preset", t("voice_preset")]] : []),
      ...this.#registered.map(({ id, name }) => [`id:${id}`, name]),
      ["own", t("voice_own")],
    ], voice);
    this.#own.hidden = voice !== "own";
    const own = voice === "own" && voices.ownVoice();
    const facts = own && { name: own.name, seconds: own.duration.toFixed(1) };
    setPlain(this.#state, voice !== "own" ? "" : own ? t("voice_stored", facts) : t("voice_missing"));
  }

  async #keep(name, file) {
    try {
      voices.keepOwnVoice(name, await voices.decodeVoice(file));
      this.refresh();
    } catch {
      setText(this.#state, "voice_bad");
    }
  }

  async #recordVoice() {
    this.#record.disabled = true;
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      const file = await voices.recordVoice(stream, (seconds) => setPlain(this.#record, t("voice_recording", { seconds })));
      await this.#keep(t("voice_own"), file);
    } catch {
      setText(this.#state, "mic_refused");
    } finally {
      this.#record.disabled = false;
      setText(this.#record, "voice_record");
    }
  }

  async #play() {
    try {
      await voices.playVoice((await this.#chosenVoice()) ?? (await voices.defaultVoice()));
    } catch {
      setText(this.#state, "voice_failed");
    }
  }

  /** The items that instructions and voice amount to. */
  async #fillItems() {
    const voice = (await this.#chosenVoice().catch(() => null)) ?? (await voices.defaultVoice().catch(() => null));
    const name = this.#voice.selectedOptions[0]?.text ?? "";
    this.#items.items = this.#chosenContent(voice).map((item) => (item.type === "audio" ? { ...item, name } : item));
  }

  /** Items to be edited one by one; null: instructions and voice are in use. */
  get items() {
    return this.#settings.values.byItem ? this.#items.items : null;
  }

  set items(items) {
    if (items) this.#items.items = items;
    this.#settings.set({ byItem: items !== null });
    this.refresh();
  }

  /** The voice as base64 float32 at 16 kHz; null for the server's default. @throws {Error} */
  async voice() {
    return this.#settings.values.byItem ? this.#items.voice : this.#chosenVoice();
  }

  async #chosenVoice() {
    const { voice, preset } = this.#settings.values;
    if (voice === "own") {
      const own = voices.ownVoice();
      return own && voices.voiceText(own);
    }
    if (voice.startsWith("id:")) return (await fetchJson(`${VOICES}/${encodeURIComponent(voice.slice(3))}/audio`)).data;
    if (voice !== "preset" || !this.#preset) return null;
    const sounds = await fetchJson(`/api/presets/${this.#mode}/${encodeURIComponent(preset)}/audio`);
    return (sounds.ref_audio ?? sounds.system_content_audio?.[0])?.data ?? null;
  }

  /**
   * The items of the system message. @param {string|null} voice its sound, if the answers are spoken
   * @returns {object[]}
   */
  content(voice) {
    return this.#settings.values.byItem ? this.#items.content : this.#chosenContent(voice);
  }

  #chosenContent(voice) {
    const prompt = this.#settings.values.prompt.trim();
    const text = prompt ? [{ type: "text", text: prompt }] : [];
    if (!voice) return text;
    const lead = (this.#preset && partsOf(this.#preset).lead) || t("voice_lead");
    return [{ type: "text", text: lead }, { type: "audio", data: voice }, ...text];
  }
}

const hasVoice = ({ ref_audio: voice, system_content: content = [] }) =>
  Boolean(voice) || content.some((item) => item.type === "audio");

/** A preset's instructions without the sentence that introduces its voice. */
function partsOf({ system_prompt: whole, system_content: content = [] }) {
  const join = (items) => items.filter((item) => item.type === "text").map((item) => item.text).join("\n");
  const at = content.findIndex((item) => item.type === "audio");
  return { lead: join(content.slice(0, Math.max(at, 0))), prompt: whole ?? join(content.slice(at + 1)) };
}
