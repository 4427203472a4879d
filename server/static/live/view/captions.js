/** The model's text, one list item per turn, with times. Text is inserted as text content, never as HTML. */

import { make } from "../../shared/dom.js";
import { clock, setText, t } from "../../shared/i18n.js";

const NEAR_END_PX = 80;
const MAX_TURNS = 200; // shown; all are kept for saving
const MAX_SPOKEN = 20; // sentences kept in the live region
const SENTENCE = /^.*?(?:[.!?](?=\s)|[。！？]|\n)|^.{60,}?[,;:，；：\s]/s;

export class Captions {
  #list;
  #live;
  #turns = new Map(); // of the running conversation, by number
  #startedAt = 0;
  entries = []; // all of them: {time, text, cut, heard?}, {time, own, text, pictures} or {time, event}

  /**
   * @param {HTMLElement} list ordered list
   * @param {HTMLElement} live log that announces sentences to screen readers as they arrive
   */
  constructor(list, live) {
    this.#list = list;
    this.#live = live;
  }

  clear() {
    this.#list.replaceChildren();
    this.#live.replaceChildren();
    this.#turns.clear();
    this.entries = [];
  }

  /** A conversation begins, whose turns count from 1. */
  start() {
    this.#turns.clear();
    this.#startedAt = performance.now();
  }

  /** The text of the newest turn of the model. */
  get newest() {
    return this.entries.findLast((entry) => !entry.own)?.text ?? "";
  }

  /**
   * What the user has written, shown or said. @param {string} text @param {Element[]} pictures
   * @returns {(key: string) => void} adds a remark, given the key of its text
   */
  own(text, pictures) {
    const follow = this.#isAtEnd();
    const entry = { time: clock(this.#seconds), own: true, text, pictures: pictures.length };
    const who = make("span", { class: "who" });
    setText(who, "you");
    const words = make("div", {}, who, ...(text ? [make("p", {}, text)] : []), ...pictures);
    this.#list.append(make("li", { class: "turn own" }, make("time", {}, entry.time), words));
    this.entries.push(entry);
    if (follow) this.#scroll();
    return (key) => {
      const mark = make("span", { class: "mark" });
      setText(mark, key);
      words.append(mark);
    };
  }

  /** Show dots at open turns only while the conversation runs. */
  set isLive(live) {
    this.#list.classList.toggle("live", live);
  }

  /** Append text to a turn. */
  add(number, text) {
    const follow = this.#isAtEnd();
    const turn = this.#turns.get(number) ?? this.#open(number);
    turn.entry.text += text;
    turn.words.textContent = turn.entry.text;
    turn.unsaid += text;
    for (let found; (found = turn.unsaid.match(SENTENCE)?.[0]); turn.unsaid = turn.unsaid.slice(found.length)) this.#say(found);
    if (follow) this.#scroll();
  }

  /** Mark a turn as complete. cut: it was interrupted. heard: the part of its text that was heard, if known. */
  end(number, cut, heard) {
    const turn = this.#turns.get(number);
    if (!turn) return;
    turn.item.classList.remove("open");
    this.#say(turn.unsaid);
    turn.unsaid = "";
    if (!cut) return;
    if (heard !== undefined) {
      turn.entry.heard = heard;
      turn.words.replaceChildren(heard, make("s", {}, turn.entry.text.slice(heard.length)));
    }
    if (turn.entry.cut) return;
    turn.entry.cut = true;
    turn.item.classList.add("cut");
    const mark = make("span", { class: "mark" });
    setText(mark, "turn_cut");
    turn.words.after(mark);
  }

  /** A line about the conversation itself. @param {string} key of the text */
  note(key) {
    const follow = this.#isAtEnd();
    const item = make("li", { class: "event" });
    setText(item, key);
    this.#list.append(item);
    this.entries.push({ time: clock(this.#seconds), event: item.textContent });
    if (follow) this.#scroll();
  }

  get #seconds() {
    return (performance.now() - this.#startedAt) / 1000;
  }

  #open(number) {
    for (const { item } of this.#turns.values()) item.classList.remove("open");
    const entry = { time: clock(this.#seconds), text: "", cut: false };
    const words = make("p");
    const item = make("li", { class: "turn open" }, make("time", {}, entry.time), make("div", {}, words));
    this.#list.append(item);
    const turn = { item, words, entry, unsaid: "" };
    this.#turns.set(number, turn);
    this.entries.push(entry);
    if (this.#list.children.length > MAX_TURNS) this.#list.firstElementChild.remove();
    return turn;
  }

  #say(sentence) {
    if (!sentence.trim()) return;
    this.#live.append(make("p", {}, sentence));
    if (this.#live.children.length > MAX_SPOKEN) this.#live.firstElementChild.remove();
  }

  #isAtEnd() {
    const box = this.#list.parentElement;
    return box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END_PX;
  }

  #scroll() {
    this.#list.parentElement.scrollTop = this.#list.parentElement.scrollHeight;
  }
}

/** The transcript as text, one turn a line. @param {object[]} entries of `Captions` */
export const transcriptText = (entries) => entries.map((entry) => `[${entry.time}] ${lineOf(entry)}\n`).join("");

function lineOf({ event, own, text, pictures, heard, cut }) {
  if (event) return `(${event})`;
  if (own) return `${t("you")}: ${[text, pictures && t("type_pictures", { n: pictures })].filter(Boolean).join(" ")}`;
  return (heard ?? text).trim() + (cut ? " —" : "");
}
