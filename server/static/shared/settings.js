/** Settings of a page, stored in localStorage. */

export class Settings {
  #key;

  /** @param {string} key in localStorage @param {object} defaults their types are the types of the stored values */
  constructor(key, defaults) {
    this.#key = key;
    let stored = {};
    try {
      stored = JSON.parse(localStorage.getItem(key)) ?? {};
    } catch {
      // Not written by this page: use the defaults.
    }
    this.values = structuredClone(defaults);
    for (const [name, value] of Object.entries(defaults)) {
      if (name in stored && (value === null || typeof stored[name] === typeof value)) this.values[name] = stored[name];
    }
  }

  set(changes) {
    Object.assign(this.values, changes);
    try {
      localStorage.setItem(this.#key, JSON.stringify(this.values));
    } catch {
      // Storage is full or disabled: the settings last until the page is closed.
    }
  }
}

/** Parse a JSON object. @returns {object} empty for empty text @throws {SyntaxError} */
export function jsonObject(text) {
  const value = text?.trim() ? JSON.parse(text) : {};
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new SyntaxError("settings: expected a JSON object");
  }
  return value;
}
