/** The workers: state, slots, sessions, memory, and their compile reports. */

import { byId, make } from "../../shared/dom.js";
import { hasText, t } from "../../shared/i18n.js";
import { gigabytes } from "../figures.js";
import { nameButton, rowButton, Rows, twoLines } from "../rows.js";
import { showReport } from "./report.js";

const MEMORY = "duologue_gateway_worker_memory_bytes";
const LATE = "duologue_gateway_worker_compiled_after_warm_up";

export class Workers {
  #rows = new Rows(byId("workers"), (worker) => this.#make(worker), (parts, worker) => this.#update(parts, worker));
  #metrics = null;

  /** @param {object[]} workers of GET /workers @param {import("../metrics-text.js").Metrics} metrics */
  show(workers, metrics) {
    this.#metrics = metrics;
    this.#rows.show(workers, ({ worker_id: id }) => id);
  }

  redraw() {
    this.#rows.redraw();
  }

  #make({ worker_id: id }) {
    const { title, details, what } = twoLines();
    const state = make("span", { class: "state" });
    const progress = make("progress", { max: 1, "aria-label": id });
    const trouble = make("span", { class: "bad" });
    const report = rowButton("report", () => showReport(id));
    what.append(trouble, progress);
    return { title, details, state, progress, trouble, report, children: [what, state, report] };
  }

  #update({ title, details, state, progress, trouble, report }, worker) {
    const { worker_id: id, slots, sessions, status, error } = worker;
    const isBad = ["error", "offline"].includes(status);
    title.textContent = `${id} · ${worker.host}:${worker.port} · GPU ${worker.gpu_id}`;
    state.textContent = hasText(`status_${status}`) ? t(`status_${status}`) : status;
    state.className = isBad ? "state bad" : status === "loading" ? "state wait" : "state";
    const share = worker.progress?.total ? worker.progress.done / worker.progress.total : null;
    progress.hidden = status !== "loading";
    if (share === null) progress.removeAttribute("value");
    else progress.value = share;
    details.textContent = [
      ...(status === "loading" && worker.progress?.what ? [worker.progress.what] : []),
      t("worker_slots", { used: slots.total - slots.free, total: slots.total }),
      ...(sessions.length ? [sessions.join(", ")] : []),
      t("worker_units", { n: worker.total_requests }),
      ...(worker.avg_inference_time_ms ? [t("worker_mean", { ms: Math.round(worker.avg_inference_time_ms) })] : []),
      ...this.#memory(id),
    ].join(" · ");
    const late = this.#metrics.sum(LATE, { worker: id }) ?? 0;
    trouble.textContent = [...(error ? [error] : []), ...(late ? [t("worker_compiled_late", { n: late })] : [])].join(" · ");
    report.hidden = isBad;
    nameButton(report, id);
  }

  #memory(id) {
    return ["allocated", "resident"].flatMap((kind) => {
      const [found] = this.#metrics.all(MEMORY, { worker: id, kind });
      return found ? [t(`memory_${kind}`, { size: gigabytes(found.value) })] : [];
    });
  }
}
