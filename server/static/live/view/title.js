/** The tab's title: the state, and a call when the wait is over while the tab is hidden. */

import { t } from "../../shared/i18n.js";

let called = false;

/** @param {string} state @param {{position?: number}} details of the queue */
export function showTitle(state, details = {}) {
  const name = t("title");
  if (state === "queued") document.title = details.position ? `(${details.position}) ${t("state_queued")} – ${name}` : `${t("state_queued")} – ${name}`;
  else if (called && document.hidden) document.title = `${t("your_turn")} – ${name}`;
  else document.title = ["idle", "ended"].includes(state) ? name : `${t(`state_${state}`)} – ${name}`;
}

/** The wait is over: call the user until the tab is visible. @param {() => string} state */
export function callUser(state) {
  called = true;
  showTitle(state());
  const seen = () => {
    if (document.hidden) return;
    called = false;
    document.removeEventListener("visibilitychange", seen);
    showTitle(state());
  };
  document.addEventListener("visibilitychange", seen);
  seen();
}
