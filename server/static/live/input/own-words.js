/** The user's own words as text. The browser recognizes them on this device; the sound goes to no other server. */

import { byId } from "../../shared/dom.js";
import { language, onLanguage } from "../../shared/i18n.js";

const Recognition = globalThis.SpeechRecognition ?? globalThis.webkitSpeechRecognition;
const RESTART_MS = 300;
const where = () => ({ langs: [language() === "zh" ? "zh-CN" : "en-US"], processLocally: true });
const state = async () => (await Recognition?.available?.(where()).catch(() => "unavailable")) ?? "unavailable";

export class OwnWords {
  #settings;
  #on;
  #track = null; // of the running conversation
  #running = null;

  /** @param {Settings} settings with ownWords @param {object} on words(text), failed() */
  constructor(settings, on) {
    this.#settings = settings;
    this.#on = on;
    const box = byId("set-own-words");
    box.checked = settings.values.ownWords;
    box.onchange = () => {
      settings.set({ ownWords: box.checked });
      this.#restart();
    };
    onLanguage(async () => {
      byId("own-words").hidden = (await state()) === "unavailable";
      this.#restart();
    });
  }

  /** Recognize from this microphone, if the user wants it. @param {MediaStreamTrack} track */
  start(track) {
    this.#track = track;
    this.#restart();
  }

  stop() {
    this.#track = null;
    this.#restart();
  }

  async #restart() {
    this.#running?.abort();
    this.#running = null;
    const track = this.#track;
    if (!track || !this.#settings.values.ownWords) return;
    try {
      const found = await state();
      const isThere = found === "available" || (found !== "unavailable" && (await Recognition.install(where())));
      if (track !== this.#track || this.#running) return; // changed meanwhile
      if (isThere) this.#run(track);
      else this.#on.failed();
    } catch {
      this.#on.failed();
    }
  }

  #run(track) {
    const recognition = (this.#running = new Recognition());
    Object.assign(recognition, { lang: where().langs[0], processLocally: true, continuous: true });
    recognition.onresult = ({ resultIndex, results }) => {
      for (const result of [...results].slice(resultIndex)) {
        const text = result[0].transcript.trim();
        if (result.isFinal && text) this.#on.words(text);
      }
    };
    recognition.onerror = ({ error }) => {
      if (["no-speech", "aborted"].includes(error) || recognition !== this.#running) return;
      this.#running = null;
      this.#on.failed();
    };
    recognition.onend = () => {
      if (recognition !== this.#running) return;
      setTimeout(() => recognition === this.#running && recognition.start(track), RESTART_MS);
    };
    recognition.start(track);
  }
}
