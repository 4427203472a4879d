/** The model's text, one list item per turn, with times. Text is inserted as text content, never as HTML. */

import { clock, setText } from "./i18n.js";

const NEAR_END_PX = 80;
const MAX_TURNS = 200;

export class Captions {
  #list;
  #live;
  #turns = new Map();
  #startedAt = 0;

  /**
   * @param {HTMLElement} list ordered list
   * @param {HTMLElement} live region that announces complete turns to screen readers
   */
  constructor(list, live) {
    this.#list = list;
    this.#live = live;
  }

  clear() {
    this.#list.replaceChildren();
    this.#live.textContent = "";
    this.#turns.clear();
  }

  /** Start the clock of the displayed times. */
  start() {
    this.#startedAt = performance.now();
  }

  /** Append text to a turn. */
  add(number, text) {
    const follow = this.#isAtEnd();
    const turn = this.#turns.get(number) ?? this.#open(number);
    turn.words.textContent += text;
    if (follow) this.#list.parentElement.scrollTop = this.#list.parentElement.scrollHeight;
  }

  /** Mark a turn as complete. cut: it was interrupted. */
  end(number, cut) {
    const turn = this.#turns.get(number);
    if (!turn) return;
    turn.item.classList.remove("open");
    this.#live.textContent = turn.words.textContent;
    if (!cut) return;
    turn.item.classList.add("cut");
    const mark = document.createElement("span");
    mark.className = "mark";
    setText(mark, "turn_cut");
    turn.words.after(mark);
  }

  #open(number) {
    for (const { item } of this.#turns.values()) item.classList.remove("open");
    const item = document.createElement("li");
    item.className = "turn open";
    const time = document.createElement("time");
    time.textContent = clock((performance.now() - this.#startedAt) / 1000);
    const body = document.createElement("div");
    const words = document.createElement("p");
    body.append(words);
    item.append(time, body);
    this.#list.append(item);
    const turn = { item, words };
    this.#turns.set(number, turn);
    if (this.#list.children.length > MAX_TURNS) this.#list.firstElementChild.remove();
    return turn;
  }

  #isAtEnd() {
    const box = this.#list.parentElement;
    return box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END_PX;
  }
}
