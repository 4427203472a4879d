/** The comment of a recording, which every visitor can change. */

import { fetchJson, sendJson } from "../shared/api.js";
import { byId } from "../shared/dom.js";
import { setPlain, setText } from "../shared/i18n.js";

export class Comment {
  #path;

  /** @param {string} api address of the recording's routes */
  constructor(api) {
    this.#path = `${api}/comment`;
    byId("comment-form").onsubmit = (event) => {
      event.preventDefault();
      this.#save();
    };
    byId("comment").oninput = () => setPlain(byId("comment-state"), "");
  }

  async load() {
    byId("comment").value = (await fetchJson(this.#path)).comment;
  }

  async #save() {
    try {
      await sendJson(this.#path, { comment: byId("comment").value });
      setText(byId("comment-state"), "saved");
    } catch (error) {
      setPlain(byId("comment-state"), error.message);
    }
  }
}
