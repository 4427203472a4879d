/** What can go wrong, by code: what it ends, what it takes the place of, which of our sentences tells it. */

const FATAL = ["engine", "draining", "worker_lost", "context_full", "not_prepared", "internal"];
const OF_NO_UNIT = ["unknown_type", "bad_json", "backlog_full"]; // about messages that get no result
/** After these there was no conversation that could be taken up again. */
const NOT_BEGUN = ["insecure", "mic_denied", "mic_missing", "mic_busy", "start_failed", "bad_config"];

/** Whether a server's error ends a conversation that goes on. */
export const endsConversation = (code) => FATAL.includes(code);

/** Whether a server's error stands in the place of a unit's result. */
export const standsForUnit = (code) => !OF_NO_UNIT.includes(code);

export const hasBegun = (code) => !NOT_BEGUN.includes(code);

/** @param {{reason: string}} message `timeout` @param {string} state of the conversation */
export function timeoutTrouble({ reason }, state) {
  return reason?.startsWith("Pause") || state === "paused" ? "pause_timeout" : "idle_timeout";
}

/** @param {Error} error that kept a conversation from starting */
export function troubleOf(error) {
  switch (error.name) {
    case "InsecureContext": return "insecure";
    case "BadConfig": return "bad_config";
    case "NotAllowedError": return "mic_denied";
    case "NotFoundError": return "mic_missing";
    case "NotReadableError": return "mic_busy";
    default: return "start_failed";
  }
}
