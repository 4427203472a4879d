/** The conversation of a recording: units of a duplex session, or turns of the other kinds. */

import { byId } from "../shared/dom.js";
import { onLanguage } from "../shared/i18n.js";
import { turnEntry } from "./turn-entry.js";
import { unitEntry } from "./unit-entry.js";

const PART = 100; // entries that are added at a time
const UNIT_MS = 1000; // of recordings without `replay_ms`

export class Entries {
  #list = byId("entries");
  #asset;
  #onPlay;
  #entries = [];
  #make = unitEntry;
  #begins = [];
  #marked = null;

  /** @param {(path: string) => string} asset address of a media file @param {(seconds: number) => void} onPlay */
  constructor(asset, onPlay) {
    this.#asset = asset;
    this.#onPlay = onPlay;
    byId("more").onclick = () => {
      const before = this.#list.children.length;
      this.#add(PART);
      this.#list.children[before]?.querySelector("button")?.focus();
    };
    onLanguage(() => this.#redraw());
  }

  /** @param {object} recording content of recording.json */
  show(recording) {
    const { chunks, turns = [] } = recording;
    this.#entries = chunks ?? turns;
    this.#make = chunks ? unitEntry : turnEntry;
    this.#begins = this.#entries.map((one, i) => (one.replay_ms ?? i * UNIT_MS) / 1000);
    byId("conversation").hidden = this.#entries.length === 0;
    this.#redraw();
  }

  /** Mark the entry that plays at a position of the replay. */
  markAt(seconds) {
    const next = this.#begins.findIndex((begin) => begin > seconds);
    const entry = this.#list.children[(next < 0 ? this.#begins.length : next) - 1] ?? null;
    if (entry === this.#marked) return;
    this.#marked?.removeAttribute("aria-current");
    entry?.setAttribute("aria-current", "true");
    this.#marked = entry;
  }

  #redraw() {
    const n = Math.max(PART, this.#list.children.length);
    this.#list.replaceChildren();
    this.#add(n);
  }

  #add(n) {
    const from = this.#list.children.length;
    const added = this.#entries.slice(from, from + n);
    this.#list.append(...added.map((entry, i) =>
      this.#make(entry, { at: this.#begins[from + i], asset: this.#asset, onPlay: this.#onPlay })));
    byId("more").hidden = this.#list.children.length >= this.#entries.length;
  }
}
