/** The settings sheet. Each change is stored at once; during a conversation it also takes effect where possible. */

import { byId } from "../../shared/dom.js";
import { closable } from "../../shared/dialogs.js";
import { Fields, nested } from "../../shared/fields.js";
import { setPlain, setText } from "../../shared/i18n.js";
import { jsonObject } from "../../shared/settings.js";
import { Characters } from "./characters.js";
import { deviceFields } from "./device-fields.js";
import { SESSION_SETTINGS } from "./session-settings.js";
import { VoiceField } from "./voice-field.js";

const MAX_DELAY_MS = 2000;
const BARGE_IN_MS = { min: 100, usual: 200, max: 1000 };

export class Panel {
  #settings;
  #on;
  #refreshDevices;
  #fields;
  characters;
  voice;

  /**
   * @param {Settings} settings @param {string} mode @param {object} on mic(id), camera(id), speaker(id), notice(code), bargeIn(),
   *   adjust(fields) with fields of the message `adjust`, isLive(): whether it takes effect
   */
  constructor(settings, mode, on) {
    this.#settings = settings;
    this.#on = on;
    this.characters = new Characters(settings, () => this.#onCharacter());
    this.voice = new VoiceField(settings, mode, this.characters, { changed: () => this.#adjustVoice(), notice: on.notice });
    this.#refreshDevices = deviceFields(settings, on);
    this.#fields = new Fields(byId("session-fields"), SESSION_SETTINGS, settings.values.session, (key, value) => this.#onSetting(key, value));
    byId("camera-row").hidden = mode !== "omni";
    byId("set-prompt").value = settings.values.prompt;
    byId("set-barge-in").checked = settings.values.bargeIn;
    byId("set-barge-in-ms").value = settings.values.bargeInMs;
    byId("set-extra").value = settings.values.extra;
    closable(byId("settings"));
    this.#listen();
  }

  #listen() {
    byId("set-prompt").oninput = ({ target }) => {
      this.#settings.set({ prompt: target.value, preset: "" });
      this.characters.refresh();
      this.voice.refresh();
    };
    byId("set-prompt").onchange = ({ target }) => this.#on.adjust({ system_prompt: target.value.trim() });
    byId("set-delay").onchange = ({ target }) => {
      const ms = target.valueAsNumber;
      this.#settings.set({ delayMs: Number.isFinite(ms) ? Math.max(0, Math.min(MAX_DELAY_MS, ms)) : null });
    };
    byId("set-barge-in").onchange = ({ target }) => {
      this.#settings.set({ bargeIn: target.checked });
      this.#on.bargeIn();
    };
    byId("set-barge-in-ms").onchange = ({ target }) => {
      const { min, usual, max } = BARGE_IN_MS;
      target.value = Math.max(min, Math.min(max, target.valueAsNumber || usual));
      this.#settings.set({ bargeInMs: target.valueAsNumber });
      this.#on.bargeIn();
    };
    byId("set-extra").onchange = ({ target }) => this.#takeExtra(target);
  }

  open() {
    this.#refreshDevices();
    this.voice.refresh();
    byId("settings").showModal();
  }

  #onCharacter() {
    const { prompt } = this.#settings.values;
    if (byId("set-prompt").value !== prompt) {
      byId("set-prompt").value = prompt;
      this.#on.adjust({ system_prompt: prompt });
    }
    this.voice.refresh();
    this.#adjustVoice();
  }

  async #adjustVoice() {
    if (!this.#on.isLive()) return;
    const text = await this.voice.text().catch(() => null);
    if (text) this.#on.adjust({ ref_audio_base64: text });
  }

  #onSetting(key, value) {
    const { session } = this.#settings.values;
    if (value === undefined) delete session[key];
    else session[key] = value;
    this.#settings.set({ session });
    const { usual } = SESSION_SETTINGS.find((one) => one.key === key);
    this.#on.adjust({ config: nested({ [key]: value ?? usual }) });
  }

  #takeExtra(field) {
    try {
      jsonObject(field.value);
      setPlain(byId("extra-bad"), "");
      this.#settings.set({ extra: field.value });
    } catch {
      setText(byId("extra-bad"), "extra_bad");
    }
  }

  /** Show the playback delay in force without a setting. */
  showDelay(serverDelayMs) {
    byId("set-delay").value = this.#settings.values.delayMs ?? serverDelayMs;
  }
}

/** Session settings of `prepare`: those of the form, then the JSON text, then `?config=`. @throws {SyntaxError} */
export function sessionConfig({ session, extra }) {
  const query = new URLSearchParams(location.search).get("config");
  return { ...nested(session), ...jsonObject(extra), ...jsonObject(query) };
}
