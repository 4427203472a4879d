/** The recorded sessions of this browser, newest first, for the home page. */

const KEY = "minicpmo45_recent_sessions";
const MAX = 20;

/** @returns {{id: string, mode: string, at: number}[]} at: Unix ms */
export function recentSessions() {
  try {
    const stored = JSON.parse(localStorage.getItem(KEY));
    return Array.isArray(stored) ? stored.filter((one) => typeof one?.id === "string") : [];
  } catch {
    return []; // not written by this page
  }
}

/** @param {string} id of the recording @param {string} mode app id */
export function addRecent(id, mode) {
  const others = recentSessions().filter((one) => one.id !== id);
  store([{ id, mode, at: Date.now() }, ...others].slice(0, MAX));
}

export function removeRecent(id) {
  store(recentSessions().filter((one) => one.id !== id));
}

function store(sessions) {
  try {
    localStorage.setItem(KEY, JSON.stringify(sessions));
  } catch {
    // Storage is full or disabled: the list is not kept.
  }
}
