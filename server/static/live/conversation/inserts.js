/** What the user types and shows during a conversation: texts without an answer, and pictures for the next units. */

const REFUSALS = ["unknown_type", "bad_message", "context_full"];

export class Inserts {
  #texts = []; // called with the code of a refusal, or null
  #pictures = []; // JPEG

  /** Nothing is answered any more. */
  clear() {
    for (const answered of this.#texts.splice(0)) answered("not_sent");
    this.#pictures = [];
  }

  /** A text was sent. @returns {Promise<string|null>} code of the refusal; null: the text is in the context */
  addText() {
    return new Promise((resolve) => this.#texts.push(resolve));
  }

  /** `text_inserted` */
  accept() {
    this.#texts.shift()?.(null);
  }

  /** @param {object} message an error @returns {boolean} whether it refuses a text, and nothing else */
  refuse({ code, error = "" }) {
    const isOther = error.startsWith("adjust") || (code === "unknown_type" && !error.includes("insert_text"));
    if (!this.#texts.length || !REFUSALS.includes(code) || isOther) return false;
    this.#texts.shift()(code);
    return true;
  }

  /** @param {Uint8Array[]} pictures JPEG, one for each of the next units */
  show(pictures) {
    this.#pictures.push(...pictures);
  }

  /** The picture for this unit; undefined: none waits. */
  takePicture() {
    return this.#pictures.shift();
  }
}
