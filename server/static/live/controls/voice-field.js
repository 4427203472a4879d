/** The choice of the voice: the server's, the character's or the user's own. */

import { fetchJson } from "../../shared/api.js";
import { byId, fillSelect } from "../../shared/dom.js";
import { onLanguage, setPlain, setText, t } from "../../shared/i18n.js";
import * as voices from "../../shared/audio/voices.js";

const VOICES = "/api/assets/ref_audio";

export class VoiceField {
  #registered = []; // {id, name}
  #settings;
  #mode;
  #characters;
  #on;

  /** on: {changed(), notice(code)} */
  constructor(settings, mode, characters, on) {
    this.#settings = settings;
    this.#mode = mode;
    this.#characters = characters;
    this.#on = on;
    byId("set-voice").onchange = ({ target }) => {
      settings.set({ voice: target.value });
      this.refresh();
      on.changed();
    };
    byId("voice-file").onchange = ({ target: { files } }) => {
      if (files.length) this.#keep(files[0].name, files[0]);
    };
    byId("voice-record").onclick = ({ target }) => this.#record(target);
    byId("voice-play").onclick = () => this.#play();
    onLanguage(() => this.refresh());
  }

  /** Fetch the registered voices. */
  async load() {
    this.#registered = await fetchJson(VOICES).then((body) => body.ref_audios, () => []);
    this.refresh();
  }

  async #keep(name, file) {
    try {
      voices.keepOwnVoice(name, await voices.decodeVoice(file));
      this.refresh();
      this.#on.changed();
    } catch {
      setText(byId("voice-state"), "voice_bad");
    }
  }

  async #record(button) {
    button.disabled = true;
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      const file = await voices.recordVoice(stream, (seconds) => setPlain(button, t("voice_recording", { seconds })));
      await this.#keep(t("voice_own"), file);
    } catch {
      setText(byId("voice-state"), "error_mic_denied_text");
    } finally {
      button.disabled = false;
      setText(button, "voice_record");
    }
  }

  async #play() {
    try {
      await voices.playVoice((await this.text()) ?? (await voices.defaultVoice()));
    } catch {
      this.#on.notice("voice_failed");
    }
  }

  /** The chosen voice in the form of `prepare`; null for the server's default. @throws {Error} */
  async text() {
    const { voice, preset } = this.#settings.values;
    const own = voice === "own" && voices.ownVoice();
    if (own) return voices.voiceText(own);
    if (voice.startsWith("id:")) return (await fetchJson(`${VOICES}/${encodeURIComponent(voice.slice(3))}/audio`)).data;
    return voice === "preset" && preset ? voices.presetVoice(this.#mode, preset) : null;
  }

  refresh() {
    const { voice } = this.#settings.values;
    fillSelect(byId("set-voice"), [
      ["default", t("voice_default")],
      ...(this.#characters.current?.ref_audio ? [["preset", t("voice_preset")]] : []),
      ...this.#registered.map(({ id, name }) => [`id:${id}`, name]),
      ["own", t("voice_own")],
    ], voice);
    byId("own-voice").hidden = voice !== "own";
    const own = voices.ownVoice();
    const facts = own && { name: own.name, seconds: own.duration.toFixed(1) };
    setPlain(byId("voice-state"), own ? t("voice_stored", facts) : t("voice_none"));
  }
}
