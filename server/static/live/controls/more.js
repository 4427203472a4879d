/** The panel behind "More": sources of pictures, volume, answer length, pictures, recording. */

import { byId, icon, make } from "../../shared/dom.js";
import { setText } from "../../shared/i18n.js";

const ACTIONS = [
  ["flip", "flip"], ["screen", "screen"], ["file", "source_file"], ["record", "record_start"], ["share", "share"],
  ["full", "fullscreen"], ["help", "help"],
];
/** length_penalty of each choice; undefined: the setting or the default. */
export const LENGTHS = { short: 0.9, usual: undefined, long: 1.3 };
export const USUAL_LENGTH = 1.1;

export class More {
  #root = byId("more");
  #on;

  /**
   * @param {object} on one function for each action, and volume(0 to 1), length(name), detailed(on), mirror(on),
   *   torch(on), zoom(value)
   * @param {{volume: number, length: string, detailed: boolean, mirror: boolean}} values
   */
  constructor(on, values) {
    this.#on = on;
    this.#root.append(this.#actions(), this.#sliders(values), this.#switches(values));
    byId("open-more").onclick = () => this.toggle();
  }

  #actions() {
    const buttons = ACTIONS.map(([name, key]) => {
      const text = make("span", {});
      setText(text, key);
      return make("button", { type: "button", id: name === "help" ? "open-help" : name, onclick: () => this.#act(name) }, icon(name), text);
    });
    return make("div", { class: "actions" }, ...buttons);
  }

  #act(name) {
    this.toggle(false);
    this.#on[name]();
  }

  #sliders({ volume, length }) {
    const loud = make("input", { type: "range", id: "volume", min: 0, max: 1, step: 0.05 });
    loud.value = volume;
    loud.oninput = () => this.#on.volume(loud.valueAsNumber);
    const long = make("select", { id: "length" });
    for (const name of Object.keys(LENGTHS)) {
      const option = new Option("", name);
      setText(option, `length_${name}`);
      long.append(option);
    }
    long.value = length;
    long.onchange = () => this.#on.length(long.value);
    const zoom = make("input", { type: "range", id: "zoom" });
    zoom.oninput = () => this.#on.zoom(zoom.valueAsNumber);
    return make("div", { class: "sliders" }, field("volume", loud), field("length", long), field("zoom", zoom));
  }

  #switches({ detailed, mirror }) {
    const box = (name, on) => {
      const input = make("input", { type: "checkbox", id: `set-${name}`, checked: on });
      input.onchange = () => this.#on[name](input.checked);
      const text = make("span", {});
      setText(text, name);
      return make("label", { class: "check", id: `${name}-row` }, input, text);
    };
    return make("div", { class: "switches" }, box("detailed", detailed), box("mirror", mirror), box("torch", false));
  }

  /** Show what the camera of this moment can do. @param {object} can {flip, screen, mirror, torch, zoom, share, full} */
  refresh(can) {
    for (const [name, possible] of Object.entries({ ...can, zoom: Boolean(can.zoom) })) {
      const element = byId(`${name}-row`) ?? byId(name);
      element.hidden = !possible;
    }
    if (can.zoom) Object.assign(byId("zoom"), { min: can.zoom.min, max: can.zoom.max, step: can.zoom.step || 0.1 });
  }

  showRecording(on) {
    setText(byId("record").querySelector("span"), on ? "record_stop" : "record_start");
    byId("record").setAttribute("aria-pressed", on);
  }

  showScreen(on) {
    setText(byId("screen").querySelector("span"), on ? "screen_stop" : "screen");
  }

  get isOpen() {
    return !this.#root.hidden;
  }

  /** Open or close the panel. The focus follows. */
  toggle(open = !this.isOpen) {
    if (open === this.isOpen) return;
    this.#root.hidden = !open;
    const button = byId("open-more");
    button.setAttribute("aria-expanded", open);
    if (open) this.#root.querySelector("button:not([hidden])").focus();
    else button.focus();
  }
}

function field(key, control) {
  const title = make("span", {});
  setText(title, key);
  return make("label", { id: `${key}-row` }, title, control);
}
