/** The system message item by item: texts, sounds and pictures in the order in which the model reads them. */

import * as voices from "../audio/voices.js";
import { soundText, toBase64 } from "../audio/wire.js";
import { Database } from "../database.js";
import { icon, make } from "../dom.js";
import { onLanguage, t } from "../i18n.js";
import { jpegOf } from "../picture.js";

const MAX_SIDE = 2048; // pixels of a picture
const QUALITY = 0.9;
const ACCEPTED = { audio: "audio/*,video/*", image: "image/*" };
const database = new Database("duologue_system", ["items"]);

export class SystemItems {
  #root;
  #key;
  #kinds;
  #list = make("ol", { class: "system-items" });
  #state = make("p", { class: "help", role: "status" });
  #items = []; // {type: "text", text} or {type: "audio"|"image", name, data: base64}

  /** @param {HTMLElement} root @param {string} key under which the items are stored @param {string[]} kinds types of items */
  constructor(root, key, kinds) {
    this.#root = root;
    this.#key = key;
    this.#kinds = kinds;
    onLanguage(() => this.draw());
  }

  async load() {
    this.#items = (await database.run("readonly", (table) => table.get(this.#key)).catch(() => null)) ?? [];
    this.draw();
  }

  get items() {
    return this.#items;
  }

  set items(items) {
    this.#items = items;
    this.#changed();
  }

  /** @returns {object[]} as a message has them */
  get content() {
    const kept = this.#items.filter(({ type, text }) => type !== "text" || text.trim());
    return kept.map(({ type, text, data }) => (type === "text" ? { type, text } : { type, data }));
  }

  /** The first sound, base64 float32 at 16 kHz; null without one. */
  get voice() {
    return this.#items.find(({ type }) => type === "audio")?.data ?? null;
  }

  #changed() {
    this.draw();
    this.#keep();
  }

  #keep() {
    const items = structuredClone(this.#items);
    database.run("readwrite", (table) => table.put(items, this.#key)).catch(() => (this.#state.textContent = t("items_not_kept")));
  }

  draw() {
    this.#list.replaceChildren(...this.#items.map((item, i) => this.#row(item, i)));
    const add = this.#kinds.map((type) => (type === "text"
      ? make("button", { type: "button", class: "button", onclick: () => this.#add({ type, text: "" }) }, t("items_add_text"))
      : this.#fileButton(type)));
    this.#root.replaceChildren(make("p", { class: "help" }, t("items_help")), this.#list, make("div", { class: "row" }, ...add), this.#state);
  }

  #add(item) {
    this.items = [...this.#items, item];
    this.#list.lastElementChild.querySelector("textarea, button").focus();
  }

  #fileButton(type) {
    const input = make("input", { type: "file", accept: ACCEPTED[type], "data-type": type });
    input.onchange = async () => {
      const [file] = input.files;
      try {
        const data = type === "audio" ? soundText(await voices.decodeVoice(file)) : await pictureText(file);
        this.#state.textContent = "";
        this.#add({ type, name: file.name, data });
      } catch {
        this.#state.textContent = t("items_bad", { name: file.name });
      }
    };
    return make("label", { class: "button" }, make("span", {}, t(`items_add_${type}`)), input);
  }

  #row(item, i) {
    const place = { n: i + 1, kind: t(`items_${item.type}`) };
    const button = (key, symbol, disabled, act) => {
      const name = t(key, place);
      return make("button", { type: "button", class: "quiet icon", title: name, "aria-label": name, disabled, onclick: act }, icon(symbol));
    };
    const last = this.#items.length - 1;
    return make("li", {},
      make("div", { class: "head" }, make("span", {}, t("items_title", place)),
        button("items_up", "up", i === 0, () => this.#move(i, -1)),
        button("items_down", "down", i === last, () => this.#move(i, 1)),
        button("items_remove", "close", false, () => this.#remove(i))),
      this.#body(item, place));
  }

  #body(item, place) {
    if (item.type === "image") return make("img", { src: `data:image/jpeg;base64,${item.data}`, alt: item.name });
    if (item.type === "audio") {
      const play = make("button", { type: "button", class: "button", onclick: () => voices.playVoice(item.data) }, t("voice_play"));
      return make("div", { class: "row" }, play, make("span", { class: "name" }, item.name));
    }
    const area = make("textarea", { rows: 3, maxlength: 8000, "aria-label": t("items_title", place) }, item.text);
    area.onchange = () => {
      item.text = area.value;
      this.#keep();
    };
    return area;
  }

  #move(i, step) {
    const items = [...this.#items];
    items.splice(i + step, 0, ...items.splice(i, 1));
    this.items = items;
    const [up, down] = this.#list.children[i + step].querySelectorAll("button");
    const wanted = step < 0 ? up : down;
    (wanted.disabled ? (step < 0 ? down : up) : wanted).focus();
  }

  #remove(i) {
    this.items = this.#items.filter((_, at) => at !== i);
    (this.#list.children[Math.min(i, this.#items.length - 1)] ?? this.#root).querySelector("textarea, button").focus();
  }
}

const pictureText = async (file) => toBase64(new Uint8Array(await (await jpegOf(file, MAX_SIDE, QUALITY)).arrayBuffer()));
