/** The timing of the conversation: the plot's legend and the figures under it. */

import { byId, make } from "../../shared/dom.js";
import { language, setText, t } from "../../shared/i18n.js";

const LEGEND = [
  ["listen", "plot_listen"], ["speak", "plot_speak"], ["late", "plot_late"],
  ["solid", "plot_server"], ["pale", "plot_total"], ["limit", "plot_limit_line"],
];
const FIGURES = ["reply", "first", "units", "late", "gaps", "context"];

export function drawTiming() {
  byId("legend").append(...LEGEND.map(([name, key]) => {
    const text = make("span", {});
    setText(text, key);
    return make("li", {}, make("i", { class: name }), text);
  }));
  byId("figures").append(...FIGURES.map((name) => {
    const title = make("dt", {});
    setText(title, `figure_${name}`);
    return make("div", {}, title, make("dd", { id: `figure-${name}` }, "–"));
  }));
  byId("figures").after(make("p", { class: "wait", id: "wait", hidden: true }));
}

/** @param {object} figures of `Stats` */
export function showFigures({ units, replyP95, firstSound, late, context, gaps, gapMs, answer, lastAnswer }) {
  show("units", units || null);
  show("reply", replyP95 && Math.round(replyP95), "ms");
  show("first", firstSound && Math.round(firstSound), "ms");
  show("late", units ? late : null, "", late > 0);
  show("context", context?.toLocaleString(language()));
  showWait(answer, lastAnswer);
  show("gaps", units ? gaps : null, gaps ? `${Math.round(gapMs)} ms` : "", gaps > 0);
}

/** The wait for the last answer and its parts, and the median of all. */
function showWait(median, last) {
  const element = byId("wait");
  element.hidden = last === null;
  if (last === null) return;
  const parts = Object.fromEntries(Object.entries({ ...last, median }).map(([name, ms]) => [name, Math.round(ms)]));
  element.textContent = t(last.saved ? "wait_early" : "wait_parts", parts);
}

function show(name, value, unit = "", bad = false) {
  const element = byId(`figure-${name}`);
  element.textContent = value ?? "–";
  element.classList.toggle("bad", bad);
  if (unit && value !== null && value !== undefined) element.append(make("small", {}, unit));
}
