/** Counters of the whole server. */

import { byId, make } from "../../shared/dom.js";
import { t } from "../../shared/i18n.js";
import { count, percent, seconds } from "../figures.js";

const PREFIX = "duologue_gateway_";

export class Overview {
  #status = null;
  #metrics = null;
  #before = null; // {at, units} of the refresh before
  #perSecond = null;

  /** @param {object} status of GET /status @param {import("../metrics-text.js").Metrics} metrics */
  show(status, metrics) {
    this.#status = status;
    this.#metrics = metrics;
    const units = metrics.sum(`${PREFIX}units_total`) ?? 0;
    const now = performance.now();
    if (this.#before) this.#perSecond = (1000 * (units - this.#before.units)) / (now - this.#before.at);
    this.#before = { at: now, units };
    byId("random").hidden = !status.random_weights;
    this.redraw();
  }

  redraw() {
    if (this.#status) byId("tiles").replaceChildren(...this.#tiles().map(([key, text, bad]) =>
      make("div", {}, make("dt", {}, t(key)), make("dd", { class: bad ? "bad" : null }, text))));
  }

  #tiles() {
    const { slots, queue_length: waiting, max_queue_size: places, connections, draining, ...workers } = this.#status;
    const sum = (name, labels) => this.#metrics.sum(PREFIX + name, labels);
    const [units, late] = [sum("units_total") ?? 0, sum("deadline_misses_total") ?? 0];
    const bound = (name, share) => this.#metrics.quantile(PREFIX + name, share);
    const delay = bound("loop_delay_seconds", 0.99);
    return [
      ["tile_slots", t("of", { part: slots.total - slots.free, all: slots.total })],
      ["tile_queue", t("of", { part: waiting, all: places })],
      ["tile_workers", t("of", { part: workers.idle_workers + workers.busy_workers, all: workers.total_workers }), workers.error_workers + workers.offline_workers > 0],
      ["tile_connections", count(connections)],
      ["tile_units", count(units)],
      ["tile_rate", this.#perSecond === null ? "–" : this.#perSecond.toFixed(1)],
      ["tile_late", `${count(late)} (${percent(late, units)})`, late > 0],
      ["tile_unit", seconds(bound("unit_seconds", 0.95))],
      ["tile_first", seconds(bound("first_sound_seconds", 0.95))],
      ["tile_wait", seconds(bound("queue_wait_seconds", 0.95))],
      ["tile_answers", count(sum("replies_total") ?? 0)],
      ["tile_errors", count(sum("errors_total") ?? 0)],
      ["tile_lost", count(sum("workers_lost_total") ?? 0), sum("workers_lost_total") > 0],
      ["tile_loop", seconds(delay), delay > 0.05],
      ...(draining ? [["tile_draining", t("yes"), true]] : []),
    ];
  }
}
