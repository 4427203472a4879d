/** How a recording is named: its kind, its time and its length, in the page's language. */

import { clock, hasText, language, t } from "../shared/i18n.js";

/** @param {object} meta content of meta.json */
export const headingOf = (meta) => {
  const key = `kind_${meta.app_type}`;
  return hasText(key) ? t(key) : t("recording");
};

/** Date and time. */
export function timeOf(meta) {
  const time = new Date(meta.created_at);
  if (Number.isNaN(time.getTime())) return "";
  return time.toLocaleString(language() === "zh" ? "zh-CN" : "en", { dateStyle: "medium", timeStyle: "short" });
}

/** Time, length and title, as far as they are known. */
export function factsOf(meta) {
  const length = typeof meta.duration_s === "number" ? clock(meta.duration_s) : t("no_length");
  return [timeOf(meta), length, meta.title].filter(Boolean);
}
