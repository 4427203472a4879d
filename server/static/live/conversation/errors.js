/** Error codes: which errors end the conversation, which replace a result, and the codes of errors at the start. */

const FATAL = ["engine", "draining", "worker_lost", "context_full", "not_prepared", "internal"];
const NO_RESULT = ["unknown_type", "bad_json", "backlog_full", "bad_config"]; // for messages that have no result
/** Errors before the conversation started. */
const BEFORE_START = ["insecure", "mic_denied", "mic_missing", "mic_busy", "start_failed", "bad_config"];
const RETRIED = ["server_gone", "server_unreachable", "no_answer", "worker_lost", "draining"];

/** Whether an error from the server ends a running conversation. */
export const endsConversation = (code) => FATAL.includes(code);

/** Whether an error from the server replaces the result of a unit. @param {{code?: string, error?: string}} message */
export const replacesResult = ({ code, error }) => !NO_RESULT.includes(code) && !error?.startsWith("adjust");

/** Whether the conversation had not started. */
export const isBeforeStart = (code) => BEFORE_START.includes(code);

/** Whether the page reconnects by itself. */
export const isRetried = (code) => RETRIED.includes(code);

/** Error code of the end of a socket. @param {{opened: boolean, isIncomplete?: boolean}} event `closed` of a session */
export function closeErrorCode({ opened, isIncomplete }) {
  if (isIncomplete) return "messages_lost";
  return opened ? "server_gone" : "server_unreachable";
}

/** Error code of a timeout. @param {{reason: string}} message `timeout` @param {string} state of the conversation */
export function timeoutCode({ reason }, state) {
  return reason?.startsWith("Pause") || state === "paused" ? "pause_timeout" : "idle_timeout";
}

/** Error code of an exception at the start of a conversation. @param {Error} error */
export function startErrorCode(error) {
  switch (error.name) {
    case "InsecureContext": return "insecure";
    case "BadConfig": return "bad_config";
    case "NotAllowedError": return "mic_denied";
    case "NotFoundError": return "mic_missing";
    case "NotReadableError": return "mic_busy";
    default: return "start_failed";
  }
}
