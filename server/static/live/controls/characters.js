/** Characters: the server's presets of this kind of conversation, as buttons on the card and as a select. */

import { byId, fillSelect, make } from "../../shared/dom.js";
import { language, onLanguage, t } from "../../shared/i18n.js";
import { fetchPresets } from "../../shared/audio/voices.js";

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

export class Characters {
  #settings;
  #presets = [];
  #chosen;

  /** @param {Settings} settings @param {() => void} chosen called after the user chose one */
  constructor(settings, chosen) {
    this.#settings = settings;
    this.#chosen = chosen;
    byId("set-preset").onchange = ({ target }) => this.#choose(target.value);
    byId("characters").addEventListener("keydown", (event) => this.#onKey(event));
    onLanguage(() => this.refresh());
  }

  async load(mode) {
    this.#presets = await fetchPresets(mode);
    const { preset, prompt } = this.#settings.values;
    if (preset === null && this.#shown.length && !prompt) this.#store(this.#shown[0].id);
    this.refresh();
    this.#chosen();
  }

  /** The chosen preset; undefined for own instructions. */
  get current() {
    return this.#presets.find((one) => one.id === this.#settings.values.preset);
  }

  /** Presets in the page's language, and the chosen one. */
  get #shown() {
    const { preset } = this.#settings.values;
    return this.#presets.filter((one) => !one.lang || one.lang === language() || one.id === preset);
  }

  #choose(id) {
    this.#store(id);
    this.refresh();
    this.#chosen();
  }

  #store(id) {
    const preset = this.#presets.find((one) => one.id === id);
    const { voice } = this.#settings.values;
    const without = voice === "preset" ? "default" : voice;
    this.#settings.set({ preset: id, voice: preset?.ref_audio ? "preset" : without, ...(preset && { prompt: promptOf(preset) }) });
  }

  /** Show the choice, after it or the language changed. */
  refresh() {
    const id = this.#settings.values.preset ?? "";
    const options = [["", t("preset_none")], ...this.#presets.map((one) => [one.id, one.name])];
    fillSelect(byId("set-preset"), options, id);
    byId("preset-help").textContent = byId("character-about").textContent = this.current?.description ?? "";
    byId("characters").replaceChildren(...this.#shown.map((one) => this.#button(one, one.id === id)));
    const hasChoice = byId("characters").querySelector("[tabindex='0']");
    if (!hasChoice) byId("characters").firstElementChild?.setAttribute("tabindex", "0");
  }

  #button({ id, name }, checked) {
    const attributes = { type: "button", role: "radio", "aria-checked": String(checked), tabindex: checked ? "0" : "-1" };
    return make("button", { ...attributes, onclick: () => this.#focus(id) }, name);
  }

  #focus(id) {
    this.#choose(id);
    byId("characters").querySelector("[aria-checked=true]")?.focus();
  }

  #onKey(event) {
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    const shown = this.#shown;
    const at = shown.findIndex((one) => one.id === this.#settings.values.preset);
    this.#focus(shown[(at + step + shown.length) % shown.length].id);
  }

  /** Show the buttons, which only the start needs. */
  set isVisible(visible) {
    byId("characters").hidden = byId("character-about").hidden = !visible || !this.#presets.length;
  }
}

/** A preset's instructions as text. */
function promptOf({ system_prompt: prompt, system_content: content = [] }) {
  return prompt ?? content.filter((item) => item.type === "text").map((item) => item.text).join("\n");
}
