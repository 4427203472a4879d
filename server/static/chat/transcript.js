/** The transcript: one list item for each message, with its attachments, speech and actions. */

import { viewOf } from "./attachments.js";
import { make } from "../shared/dom.js";
import { onLanguage, t } from "../shared/i18n.js";

const NEAR_END = 120; // pixels from the end within which the transcript follows the answer

export class Transcript {
  #list;
  #scroller;
  #on;
  #messages = [];

  /** on: edit(index), resend(index) */
  constructor(list, scroller, on) {
    this.#list = list;
    this.#scroller = scroller;
    this.#on = on;
    onLanguage(() => this.draw(this.#messages));
  }

  /** Show the messages of a conversation. */
  draw(messages) {
    this.#messages = messages;
    this.#list.replaceChildren(...messages.map((message, i) => this.#item(message, i)));
    this.#toEnd();
  }

  /** Show a message that has changed; its place is unchanged. */
  update(index) {
    const follows = this.#scroller.scrollHeight - this.#scroller.scrollTop - this.#scroller.clientHeight < NEAR_END;
    const item = this.#list.children[index];
    const message = this.#messages[index];
    if (message.isOpen) item.querySelector(".text").textContent = message.text;
    else item.replaceWith(this.#item(message, index));
    if (follows) this.#toEnd();
  }

  #toEnd() {
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }

  #item(message, index) {
    const { role, text, attachments = [], sound, isOpen, error, stopped } = message;
    const item = make("li", { class: `message ${role}${isOpen ? " open" : ""}` },
      make("p", { class: "who" }, t(role === "user" ? "you" : "model")));
    if (attachments.length) item.append(make("div", { class: "items" }, ...attachments.map(viewOf)));
    item.append(make("p", { class: "text" }, text));
    if (isOpen) return item;
    if (error) item.append(make("p", { class: "failure" }, error));
    if (stopped === "length" || stopped === "user") item.append(make("p", { class: "note" }, t(`stopped_${stopped}`)));
    if (sound) item.append(make("audio", { src: URL.createObjectURL(sound), controls: true, preload: "metadata", "aria-label": t("speech") }));
    item.append(this.#actions(role, index));
    return item;
  }

  #actions(role, index) {
    const action = (key, act) => make("button", { type: "button", class: "quiet", onclick: act }, t(key));
    if (role === "assistant") return make("div", { class: "actions" }, action("again", () => this.#on.resend(index - 1)));
    return make("div", { class: "actions" }, action("edit", () => this.#on.edit(index)), action("resend", () => this.#on.resend(index)));
  }
}
