/**
 * What the model says, turn by turn, as a script with times beside it.
 *
 * Knows a list element; text is only ever text.
 */

import { clock, tell } from "./i18n.js";

const NEAR_END_PX = 80;
const MOST_TURNS = 200;

export class Captions {
  #list;
  #live;
  #turns = new Map();
  #since = 0;

  /** @param {HTMLElement} list ordered list @param {HTMLElement} live what screen readers are told, whole turns */
  constructor(list, live) {
    this.#list = list;
    this.#live = live;
  }

  clear() {
    this.#list.replaceChildren();
    this.#live.textContent = "";
    this.#turns.clear();
  }

  /** Times count from now. */
  begin() {
    this.#since = performance.now();
  }

  /** More words of a turn. */
  add(number, text) {
    const follow = this.#isAtEnd();
    const turn = this.#turns.get(number) ?? this.#open(number);
    turn.words.textContent += text;
    if (follow) this.#list.parentElement.scrollTop = this.#list.parentElement.scrollHeight;
  }

  over(number, cut) {
    const turn = this.#turns.get(number);
    if (!turn) return;
    turn.item.classList.remove("open");
    this.#live.textContent = turn.words.textContent;
    if (!cut) return;
    turn.item.classList.add("cut");
    const mark = document.createElement("span");
    mark.className = "mark";
    tell(mark, "turn_cut");
    turn.words.after(mark);
  }

  #open(number) {
    for (const { item } of this.#turns.values()) item.classList.remove("open");
    const item = document.createElement("li");
    item.className = "turn open";
    const time = document.createElement("time");
    time.textContent = clock((performance.now() - this.#since) / 1000);
    const body = document.createElement("div");
    const words = document.createElement("p");
    body.append(words);
    item.append(time, body);
    this.#list.append(item);
    const turn = { item, words };
    this.#turns.set(number, turn);
    if (this.#list.children.length > MOST_TURNS) this.#list.firstElementChild.remove();
    return turn;
  }

  #isAtEnd() {
    const box = this.#list.parentElement;
    return box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END_PX;
  }
}
