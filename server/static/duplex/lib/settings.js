/** What the user chose, kept in localStorage. Knows names and defaults; does not know the form they are chosen in. */

const KEY = "duologue_settings";

const DEFAULTS = {
  preset: null, // id; null: not chosen yet; "": own words
  prompt: "",
  voice: "default", // or "preset", "own"
  mic: "",
  camera: "",
  speaker: "",
  cameraOn: true,
  delayMs: null, // null: the server's
  detailed: false,
  extra: "", // JSON of more session settings
};

export class Settings {
  constructor() {
    let kept = {};
    try {
      kept = JSON.parse(localStorage.getItem(KEY)) ?? {};
    } catch {
      // Written by something else: the defaults will do.
    }
    this.values = { ...DEFAULTS };
    for (const [name, value] of Object.entries(DEFAULTS)) {
      if (name in kept && (value === null || typeof kept[name] === typeof value)) this.values[name] = kept[name];
    }
  }

  set(changes) {
    Object.assign(this.values, changes);
    try {
      localStorage.setItem(KEY, JSON.stringify(this.values));
    } catch {
      // Storage is full or switched off: they hold until the page is left.
    }
  }

  /** More session settings: the field's, and over them those of `?config=`. @throws {SyntaxError} no JSON object */
  sessionConfig() {
    const asked = new URLSearchParams(location.search).get("config");
    return { ...jsonObject(this.values.extra), ...jsonObject(asked) };
  }
}

/** @returns {object} empty for empty text @throws {SyntaxError} */
export function jsonObject(text) {
  const value = text?.trim() ? JSON.parse(text) : {};
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new SyntaxError("no JSON object");
  return value;
}
