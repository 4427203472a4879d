/** Content of the card in the middle of the stage for each state. */

import { clock, hasText, t } from "../../shared/i18n.js";
import { isBeforeStart } from "../conversation/errors.js";

const EMPTY = { title: "", text: "", action: null };

/**
 * @param {string} state of the conversation, or "disabled"
 * @param {object} facts kind: "omni" or "audio". details: of the state. leftS: of a wait. durationS: of an ended
 *   conversation. server: of `ServerStatus`
 * @returns {{title: string, text: string, action: string|null, calm?: boolean, progress?: number|null}} action: key of
 *   the button. progress: 0 to 1; null: unknown
 */
export function cardOf(state, { kind, details, leftS, durationS, server }) {
  switch (state) {
    case "idle":
      return { title: t(`welcome_${kind}`), text: t(`welcome_text_${kind}`), action: "start" };
    case "disabled": {
      const { other } = details;
      const text = t(other ? "off_text_other" : "off_text");
      return { title: t(`off_title_${kind}`), text, action: other ? `off_go_${other}` : "off_again" };
    }
    case "asking":
      return { title: t("asking_title"), text: t(`asking_text_${kind}`), action: "cancel", calm: true };
    case "queued":
      return { ...queued(details, leftS, server), action: "cancel", calm: true };
    case "connecting":
    case "preparing":
      return { title: t(`${state}_title`), text: "", action: "cancel", calm: true };
    case "reconnecting": {
      const wait = leftS < 0.5 ? t("reconnecting_now") : t("reconnecting_in", { seconds: Math.ceil(leftS) });
      return { title: errorOf(details).title, text: `${wait} ${t(details.isKept ? "reconnecting_kept" : "reconnecting_text")}`, action: "reconnect" };
    }
    case "paused":
      return { title: t("paused_title"), text: leftS > 0 ? t("paused_text", { time: clock(leftS) }) : "", action: "resume" };
    case "ended":
      return { title: t("ended_title"), text: t("ended_text", { time: clock(durationS) }), action: "again" };
    case "failed":
      return { ...errorOf(details), action: isBeforeStart(details.code) ? "start" : "reconnect" };
    default:
      return EMPTY;
  }
}

/** While waiting for a slot. `reason` and `progress` come with the queue's messages, or from the server's status. */
function queued(details, leftS, server) {
  const reason = details.reason ?? server.reason;
  if (reason === "loading") {
    const { what = "", done = 0, total = 0 } = details.progress ?? server.progress ?? {};
    const text = total ? t("loading_part", { what, done, total }) : what || t("loading_text");
    return { title: t("loading_title"), text, progress: total ? done / total : null };
  }
  if (reason === "no_worker") return { title: t("no_worker_title"), text: t("no_worker_text") };
  const text = leftS < 3 ? t("queued_soon") : t("queued_text", { time: clock(leftS) });
  return { title: t("queued_title", details), text };
}

/** Title and text of an error. */
function errorOf({ code, text = "" }) {
  const key = hasText(`error_${code}`) ? `error_${code}` : "error_other";
  return { title: t(key), text: t(hasText(`${key}_text`) ? `${key}_text` : "error_other_text", { text }) };
}
