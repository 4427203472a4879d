/**
 * Controls for a list of settings, each given as plain data. An empty control means the server's default.
 *
 * A setting: {key, kind, min, max, step, options, usual, live}. kind: "number", "numbers", "range", "choice", "switch" or
 * "text"; numbers are whole, with commas between them. usual: the documented default, shown while the control is empty. options: of a choice. The texts `set_KEY` and
 * `set_KEY_help` name and explain it; dots of the key are underscores there. `option_VALUE` names an option.
 */

import { make } from "./dom.js";
import { hasText, onLanguage, setText, t } from "./i18n.js";

const name = (key) => key.replaceAll(".", "_");

export class Fields {
  #root;
  #settings;
  #values;
  #onChange;

  /**
   * @param {HTMLElement} root the controls are appended to it
   * @param {object[]} settings @param {object} values by key; absent: the default
   * @param {(key: string, value: any) => void} onChange value: undefined for the default
   */
  constructor(root, settings, values, onChange) {
    this.#root = root;
    this.#settings = settings;
    this.#values = values;
    this.#onChange = onChange;
    this.draw();
    onLanguage(() => this.draw());
  }

  draw() {
    this.#root.replaceChildren(...this.#settings.flatMap((setting) => this.#field(setting)));
  }

  #field(setting) {
    const id = `field-${name(setting.key)}`;
    const help = `set_${name(setting.key)}_help`;
    const control = this.#control(setting, id);
    const title = make("span", {});
    setText(title, `set_${name(setting.key)}`);
    const parts = [make("label", { class: "field" }, setting.kind === "range" ? withValue(title, control) : title, control)];
    if (hasText(help)) {
      control.setAttribute("aria-describedby", `${id}-help`);
      parts.push(make("p", { class: "help", id: `${id}-help` }, t(help)));
    }
    return parts;
  }

  #control(setting, id) {
    const { key, kind, min, max, step = "any", usual } = setting;
    const value = this.#values[key];
    if (kind === "choice" || kind === "switch") {
      const options = kind === "switch" ? [true, false] : setting.options;
      const select = make("select", { id });
      select.append(new Option(t("by_default", { value: this.#shown(usual) }), ""));
      for (const option of options) select.append(new Option(this.#shown(option), JSON.stringify(option)));
      select.value = value === undefined ? "" : JSON.stringify(value);
      select.onchange = () => this.#onChange(key, select.value === "" ? undefined : JSON.parse(select.value));
      return select;
    }
    const type = kind === "text" || kind === "numbers" ? "text" : "number";
    if (kind === "range") return this.#slider(setting, id);
    const input = make("input", { id, type, min, max, step, inputmode: type === "number" ? "decimal" : null,
      pattern: kind === "numbers" ? "\\d+(, ?\\d+)*" : null, placeholder: t("by_default", { value: this.#shown(usual) }) });
    input.value = kind === "numbers" ? (value ?? []).join(", ") : value ?? "";
    input.onchange = () => {
      if (!input.checkValidity()) input.reportValidity();
      else if (input.value === "") this.#onChange(key, undefined);
      else if (kind === "numbers") this.#onChange(key, input.value.split(",").map(Number));
      else this.#onChange(key, type === "number" ? input.valueAsNumber : input.value);
    };
    return input;
  }

  #slider({ key, min, max, step, usual }, id) {
    const input = make("input", { id, type: "range", min, max, step });
    input.value = this.#values[key] ?? usual;
    input.onchange = () => this.#onChange(key, input.valueAsNumber === usual ? undefined : input.valueAsNumber);
    return input;
  }

  #shown(value) {
    if (value === null) return t("option_none");
    const key = `option_${value}`;
    return hasText(key) ? t(key) : String(value);
  }
}

/** The title of a slider beside its value. */
function withValue(title, slider) {
  const value = make("output", {}, slider.value);
  slider.addEventListener("input", () => (value.textContent = slider.value));
  return make("span", {}, title, value);
}

/** Values by dotted key as a nested object: {"window.mode": "off"} becomes {window: {mode: "off"}}. */
export function nested(values) {
  const result = {};
  for (const [key, value] of Object.entries(values)) {
    const path = key.split(".");
    const last = path.pop();
    let place = result;
    for (const part of path) place = place[part] ??= {};
    place[last] = value;
  }
  return result;
}
