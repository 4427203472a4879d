/** Signs on the stage: state, timer, recording, a missing answer, connection quality. */

import { byId } from "../../shared/dom.js";
import { clock, setPlain, setText, t } from "../../shared/i18n.js";
import { isBeforeStart } from "../conversation/errors.js";

const STALL_S = 2.5;

/** Show the state. code: of an error. */
export function showBadge(state, code) {
  setText(byId("badge-text"), state === "failed" && isBeforeStart(code) ? "state_not_started" : `state_${state}`);
}

/** @param {number|null} seconds since the start; null: not running */
export function showTimer(seconds) {
  setPlain(byId("badge-time"), seconds === null ? "" : clock(seconds));
}

export function showMutedBadge(muted) {
  if (muted) setText(byId("badge-extra"), "muted");
  else setPlain(byId("badge-extra"), "");
}

/** server: the server records the session. browser: the page records. */
export function showRecording(server, browser) {
  byId("rec").hidden = !server && !browser;
  if (server || browser) setText(byId("rec-text"), server ? "rec_server" : "rec_browser");
}

/** @param {number} seconds since the oldest unit without an answer was sent */
export function showStall(seconds) {
  const shown = seconds >= STALL_S;
  byId("stall").hidden = !shown;
  if (shown) setPlain(byId("stall-text"), t("stall", { seconds: Math.floor(seconds) }));
}

/** @param {1|2|3} level of `qualityOf` */
export function showQuality(level) {
  const element = byId("quality");
  element.dataset.level = level;
  element.setAttribute("aria-label", t(`quality_${level}`));
  element.title = t(`quality_${level}`);
}
