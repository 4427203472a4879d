/** The line under the captions: text and pictures for the running conversation. */

import { byId, icon, make } from "../../shared/dom.js";
import { onLanguage, t } from "../../shared/i18n.js";
import { jpegOf } from "../../shared/picture.js";

const MAX_SIDE = 1344; // pixels of the longer side: two slices
const QUALITY = 0.85;

export class TypedInput {
  #pictures = []; // JPEG blobs
  #on;

  /** on: send(text, blobs), notice(code) */
  constructor(on) {
    this.#on = on;
    byId("type").onsubmit = (event) => {
      event.preventDefault();
      this.#submit();
    };
    byId("type-attach").onclick = () => byId("type-file").click();
    byId("type-file").onchange = async ({ target }) => {
      await this.attach([...target.files]);
      target.value = "";
    };
    addEventListener("paste", (event) => this.#takeFiles(event, event.clipboardData));
    addEventListener("dragover", (event) => event.dataTransfer?.types.includes("Files") && this.isVisible && event.preventDefault());
    addEventListener("drop", (event) => this.#takeFiles(event, event.dataTransfer));
    onLanguage(() => {
      byId("type-text").placeholder = t("type_text");
      this.#draw();
    });
  }

  get isVisible() {
    return !byId("type").hidden;
  }

  /** Show the line only while the conversation runs. What is composed stays. */
  set isVisible(visible) {
    byId("type").hidden = !visible;
  }

  #takeFiles(event, { files = [] } = {}) {
    if (!files.length || !this.isVisible || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    this.attach([...files]);
  }

  /** @param {File[]} files */
  async attach(files) {
    for (const file of files) {
      try {
        this.#pictures.push(await jpegOf(file, MAX_SIDE, QUALITY));
      } catch {
        this.#on.notice("type_picture");
      }
    }
    this.#draw();
    byId("type-text").focus();
  }

  #draw() {
    byId("type-pictures").replaceChildren(...this.#pictures.map((blob, i) => {
      const remove = make("button", { type: "button", class: "quiet icon", title: t("type_remove"), "aria-label": t("type_remove") }, icon("close"));
      remove.onclick = () => {
        this.#pictures.splice(i, 1);
        this.#draw();
        byId("type-text").focus();
      };
      return make("li", {}, pictureOf(blob), remove);
    }));
  }

  #submit() {
    const text = byId("type-text").value.trim();
    if (!text && !this.#pictures.length) return;
    this.#on.send(text, this.#pictures);
    byId("type-text").value = "";
    this.#pictures = [];
    this.#draw();
  }
}

/** A picture as an element. @param {Blob} blob */
export function pictureOf(blob) {
  const src = URL.createObjectURL(blob);
  return make("img", { src, alt: t("type_picture_alt"), onload: () => URL.revokeObjectURL(src) });
}
