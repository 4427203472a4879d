/** The settings dialog: presets, prompt, voice, devices. Each change is stored at once. */

import { language, onLanguage, t } from "./i18n.js";
import { jsonObject } from "./settings.js";
import * as voices from "./voices.js";

const byId = (id) => document.getElementById(id);

export class Panel {
  #settings;
  #mode;
  #on;
  #presets = [];

  /** on: {microphone(id), camera(id), speaker(id), notice(code)}. serverDelayMs: of `/api/frontend_defaults`. */
  constructor(settings, mode, serverDelayMs, on) {
    this.#settings = settings;
    this.#mode = mode;
    this.#on = on;
    this.#fill(serverDelayMs);
    this.#addHandlers();
    onLanguage(() => this.#refresh());
  }

  get #values() {
    return this.#settings.values;
  }

  #fill(serverDelayMs) {
    byId("set-prompt").value = this.#values.prompt;
    byId("set-voice").value = this.#values.voice;
    byId("set-delay").value = this.#values.delayMs ?? serverDelayMs;
    byId("set-detailed").checked = this.#values.detailed;
    byId("set-extra").value = this.#values.extra;
    byId("speaker-row").hidden = !("setSinkId" in AudioContext.prototype);
    for (const id of ["camera-row", "detailed-row", "detailed-help"]) byId(id).hidden = this.#mode !== "omni";
    this.#refresh();
  }

  async load() {
    this.#presets = await voices.fetchPresets(this.#mode);
    if (this.#values.preset === null && this.#presets.length && !this.#values.prompt) {
      const preset = this.#presets.find((one) => one.lang === language()) ?? this.#presets[0];
      this.#choose(preset.id);
    }
    this.#refresh();
  }

  #addHandlers() {
    const dialog = byId("settings");
    byId("open-settings").onclick = () => {
      this.#refresh();
      dialog.showModal();
    };
    dialog.onclick = ({ target }) => {
      if (target === dialog) dialog.close(); // a click outside the dialog
    };
    byId("set-preset").onchange = ({ target }) => this.#choose(target.value);
    byId("set-prompt").oninput = ({ target }) => {
      this.#settings.set({ prompt: target.value, preset: "" });
      byId("set-preset").value = "";
      this.#describe();
      this.#refreshVoice();
    };
    byId("set-voice").onchange = ({ target }) => {
      this.#settings.set({ voice: target.value });
      this.#refreshVoice();
    };
    byId("set-delay").onchange = ({ target }) => {
      const ms = target.valueAsNumber;
      this.#settings.set({ delayMs: Number.isFinite(ms) ? Math.max(0, Math.min(2000, ms)) : null });
    };
    byId("set-detailed").onchange = ({ target }) => this.#settings.set({ detailed: target.checked });
    byId("set-extra").onchange = ({ target }) => this.#takeExtra(target);
    byId("voice-file").onchange = ({ target: { files } }) => {
      if (files.length) this.#keepVoice(files[0].name, files[0]);
    };
    byId("voice-record").onclick = ({ target }) => this.#record(target);
    byId("voice-play").onclick = () => this.#play();
    for (const [id, name, handler] of DEVICES) {
      byId(id).onchange = ({ target }) => {
        this.#settings.set({ [name]: target.value });
        this.#on[handler](target.value);
      };
    }
    navigator.mediaDevices?.addEventListener?.("devicechange", () => this.#refreshDevices());
  }

  #choose(id) {
    const preset = this.#presets.find((one) => one.id === id);
    const voice = preset?.ref_audio ? "preset" : this.#values.voice === "preset" ? "default" : this.#values.voice;
    this.#settings.set({ preset: id, voice, ...(preset && { prompt: preset.system_prompt }) });
    byId("set-prompt").value = this.#values.prompt;
    this.#describe();
    this.#refreshVoice();
  }

  #describe() {
    const preset = this.#presets.find((one) => one.id === this.#values.preset);
    byId("preset-help").textContent = preset?.description ?? "";
  }

  #takeExtra(field) {
    try {
      jsonObject(field.value);
      byId("extra-bad").textContent = "";
      this.#settings.set({ extra: field.value });
    } catch {
      byId("extra-bad").textContent = t("extra_bad");
    }
  }

  // --- voices ----------------------------------------------------------------------------------

  async #keepVoice(name, file) {
    try {
      voices.keepOwnVoice(name, await voices.decodeVoice(file));
      this.#refreshVoice();
    } catch {
      byId("voice-state").textContent = t("voice_bad");
    }
  }

  async #record(button) {
    button.disabled = true;
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      const file = await voices.recordVoice(stream, (seconds) => {
        button.textContent = t("voice_recording", { seconds });
      });
      await this.#keepVoice(t("voice_own"), file);
    } catch {
      byId("voice-state").textContent = t("error_mic_denied_text");
    } finally {
      button.disabled = false;
      button.textContent = t("voice_record");
    }
  }

  async #play() {
    try {
      const text = (await this.voiceText()) ?? (await voices.defaultVoice());
      await voices.playVoice(text);
    } catch {
      this.#on.notice("voice_failed");
    }
  }

  /** The chosen voice in the form of `prepare`; null for the server's default. */
  async voiceText() {
    const { voice, preset } = this.#values;
    const own = voice === "own" && voices.ownVoice();
    if (own) return voices.voiceText(own);
    return voice === "preset" && preset ? voices.presetVoice(this.#mode, preset) : null;
  }

  // --- display ---------------------------------------------------------------------------------

  #refresh() {
    const options = [["", t("preset_none")], ...this.#presets.map((one) => [one.id, one.name])];
    fillSelect(byId("set-preset"), options, this.#values.preset ?? "");
    this.#describe();
    this.#refreshVoice();
    this.#refreshDevices();
  }

  #refreshVoice() {
    const { voice, preset } = this.#values;
    byId("set-voice").value = voice;
    const hasVoice = this.#presets.find((one) => one.id === preset)?.ref_audio;
    byId("set-voice").querySelector("[value=preset]").hidden = !hasVoice;
    byId("own-voice").hidden = voice !== "own";
    const own = voices.ownVoice();
    const facts = own && { name: own.name, seconds: own.duration.toFixed(1) };
    byId("voice-state").textContent = own ? t("voice_stored", facts) : t("voice_none");
  }

  async #refreshDevices() {
    const devices = (await navigator.mediaDevices?.enumerateDevices().catch(() => [])) ?? [];
    for (const [id, name, , kind] of DEVICES) {
      const found = devices.filter((one) => one.kind === kind && one.deviceId && one.deviceId !== "default");
      const options = found.map((one, i) => [one.deviceId, one.label || t("device_unnamed", { number: i + 1 })]);
      fillSelect(byId(id), [["", t("device_default")], ...options], this.#values[name]);
    }
  }
}

const DEVICES = [
  ["set-mic", "mic", "microphone", "audioinput"],
  ["set-camera", "camera", "camera", "videoinput"],
  ["set-speaker", "speaker", "speaker", "audiooutput"],
];

function fillSelect(select, options, value) {
  select.replaceChildren(...options.map(([id, text]) => new Option(text, id)));
  select.value = options.some(([id]) => id === value) ? value : "";
}
