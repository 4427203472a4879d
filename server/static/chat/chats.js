/** The chats of this browser: which one is shown, and the sheet that lists them. */

import { listChats, keepChat, loadMessages, removeChat } from "./store.js";
import { ask } from "../shared/dialogs.js";
import { byId, icon, make } from "../shared/dom.js";
import { language, t } from "../shared/i18n.js";
import { newSessionId } from "../shared/socket.js";

const TITLE_LENGTH = 60;
const newId = () => newSessionId("c_");

export class Chats {
  #settings;
  #on;
  id = newId(); // of the chat that is shown

  /**
   * @param {Settings} settings with `current`, the id of the last chat
   * @param {object} on leaving(), before another chat is shown, and opened(messages)
   */
  constructor(settings, on) {
    this.#settings = settings;
    this.#on = on;
  }

  /** Open the last chat, or the newest one, if there is any. */
  async start() {
    const chats = await listChats();
    const last = chats.find(({ id }) => id === this.#settings.values.current) ?? chats[0];
    if (last) await this.open(last.id);
  }

  async open(id) {
    const messages = await loadMessages(id);
    this.#show(id, messages);
  }

  /** Begin a chat. @param {object[]} messages */
  begin(messages = []) {
    this.#show(newId(), messages);
  }

  #show(id, messages) {
    this.#on.leaving();
    this.id = id;
    this.#settings.set({ current: id });
    this.#on.opened(messages);
  }

  /** Store the messages of the chat that is shown. @returns {Promise<boolean>} whether the browser stored them */
  async keep(messages) {
    if (!messages.length) return true;
    this.#settings.set({ current: this.id });
    return keepChat(this.id, titleOf(messages), messages);
  }

  /** Draw the list of all chats. */
  async draw() {
    const chats = await listChats();
    const time = new Intl.DateTimeFormat(language() === "zh" ? "zh-CN" : "en-GB", { dateStyle: "medium", timeStyle: "short" });
    byId("chats-list").replaceChildren(...chats.map((chat) => this.#row(chat, time)));
    byId("chats-empty").hidden = chats.length > 0;
  }

  #row({ id, title, at }, time) {
    const name = title || t("chat_untitled");
    const open = make("button", { type: "button", class: "open", "aria-current": id === this.id ? "true" : null, onclick: () => this.#choose(id) },
      make("span", {}, name), make("time", {}, time.format(at)));
    const remove = make("button", { type: "button", class: "quiet icon", title: t("chat_delete", { name }), "aria-label": t("chat_delete", { name }) }, icon("close"));
    remove.onclick = () => this.#remove(id);
    return make("li", {}, open, remove);
  }

  async #choose(id) {
    byId("chats").close();
    if (id !== this.id) await this.open(id);
  }

  async #remove(id) {
    if (!(await ask({ title: "chat_delete_title", text: "chat_delete_text", yes: "chat_delete_yes" }))) return;
    if (id === this.id) this.begin();
    await removeChat(id);
    await this.draw();
    byId("chats-title").focus();
  }
}

/** The begin of the first message. */
function titleOf([{ text, attachments = [] }]) {
  const line = text.split("\n")[0] || (attachments[0]?.name ?? "");
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH)} …` : line;
}
