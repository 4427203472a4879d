/** Settings and shortcomings of a recording. */

import { byId, make } from "../shared/dom.js";
import { hasText, t } from "../shared/i18n.js";

/** @param {object} meta content of meta.json */
export function showDetails(meta) {
  byId("notes").replaceChildren(...(meta.notes ?? []).map((note) => make("li", {}, String(note))));
  const facts = [["session_id", meta.session_id], ["worker_id", meta.worker_id], ...flat(meta.config ?? {})];
  const rows = facts.filter(([, value]) => value !== null && value !== undefined && value !== "");
  byId("settings").replaceChildren(...rows.flatMap(([key, value]) => [
    make("dt", {}, hasText(`config_${key}`) ? t(`config_${key}`) : key),
    make("dd", {}, typeof value === "string" ? value : JSON.stringify(value)),
  ]));
  byId("details").hidden = false;
}

/** Nested settings as [path, value]. */
function flat(settings, prefix = "") {
  return Object.entries(settings).flatMap(([key, value]) =>
    value !== null && typeof value === "object" && !Array.isArray(value)
      ? flat(value, `${prefix}${key}.`)
      : [[`${prefix}${key}`, value]]);
}
