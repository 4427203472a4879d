/** Numbers, sizes and times as text. */

import { language, t } from "../shared/i18n.js";

export const count = (number) => number.toLocaleString(language());
export const percent = (part, all) => (all ? `${((100 * part) / all).toFixed(1)} %` : "–");
export const gigabytes = (bytes) => `${(bytes / 1e9).toFixed(2)} GB`;

/** The upper bound of a bucket of seconds. */
export function seconds(bound) {
  if (bound === null) return "–";
  if (!Number.isFinite(bound)) return t("more_than_all");
  return bound < 1 ? `≤ ${Math.round(1000 * bound)} ms` : `≤ ${bound} s`;
}

/** A date of the server as local text. */
export function dateText(text) {
  const date = new Date(text);
  return Number.isNaN(date.getTime()) ? String(text ?? "") : date.toLocaleString(language() === "zh" ? "zh-CN" : "en-GB");
}
