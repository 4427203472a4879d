/** The chats of this browser, with their attachments. */

import { Database } from "../shared/database.js";

const database = new Database("duologue_chat", ["chats", "messages"]);

/** @returns {Promise<{id: string, title: string, at: number}[]>} newest first; empty if the browser stores none */
export async function listChats() {
  const chats = await database.run("readonly", (table) => table.getAll()).catch(() => []);
  return chats.sort((one, other) => other.at - one.at);
}

/** @returns {Promise<object[]>} messages of a chat; empty if there is no such chat */
export const loadMessages = (id) =>
  database.run("readonly", (_, messages) => messages.get(id)).then((found) => found ?? [], () => []);

/** Store a chat in place of its former state. @returns {Promise<boolean>} whether the browser stored it */
export const keepChat = (id, title, list) => database.run("readwrite", (chats, messages) => {
  chats.put({ id, title, at: Date.now() }, id);
  return messages.put(list, id);
}).then(() => true, () => false);

export const removeChat = (id) => database.run("readwrite", (chats, messages) => {
  chats.delete(id);
  return messages.delete(id);
}).catch(() => {}); // a browser that stores nothing has nothing to delete
