/** The user's settings, stored in localStorage. */

const KEY = "duologue_settings";

const DEFAULTS = {
  preset: null, // id; null: not chosen yet; "": none
  prompt: "",
  voice: "default", // or "preset", "own"
  mic: "",
  camera: "",
  speaker: "",
  cameraOn: true,
  delayMs: null, // null: the server's default
  detailed: false,
  extra: "", // JSON object with further session settings
};

export class Settings {
  constructor() {
    let stored = {};
    try {
      stored = JSON.parse(localStorage.getItem(KEY)) ?? {};
    } catch {
      // Not written by this page: use the defaults.
    }
    this.values = { ...DEFAULTS };
    for (const [name, value] of Object.entries(DEFAULTS)) {
      if (name in stored && (value === null || typeof stored[name] === typeof value)) this.values[name] = stored[name];
    }
  }

  set(changes) {
    Object.assign(this.values, changes);
    try {
      localStorage.setItem(KEY, JSON.stringify(this.values));
    } catch {
      // Storage is full or disabled: the settings last until the page is closed.
    }
  }

  /** Further session settings: those of the form, overridden by `?config=`. @throws {SyntaxError} not a JSON object */
  sessionConfig() {
    const query = new URLSearchParams(location.search).get("config");
    return { ...jsonObject(this.values.extra), ...jsonObject(query) };
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
