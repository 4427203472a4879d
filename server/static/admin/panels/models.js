/** Speech models and voice conversions of the workers: state and counters, and buttons that load and unload them. */

import { fetchJson, sendJson } from "../../shared/api.js";
import { ask } from "../../shared/dialogs.js";
import { byId, make } from "../../shared/dom.js";
import { t } from "../../shared/i18n.js";
import { count, gigabytes } from "../figures.js";
import { nameButton, rowButton, Rows, twoLines } from "../rows.js";

const PATH = "/api/admin/models";
const MODELS = ["speech", "conversion"];
const STARTING = ["LOADING", "COMPILING", "WARMING_UP"];

export class Models {
  #rows;
  #act;

  /** @param {(doing: () => Promise<any>, done: string) => Promise<void>} act runs an action, reports it and refreshes */
  constructor(act) {
    this.#act = act;
    this.#rows = new Rows(byId("models"), (worker) => this.#make(worker), update);
  }

  /** A model that is not in a worker's settings has no row; without any row the section is hidden. */
  async refresh() {
    const { workers } = await fetchJson(PATH);
    const shown = workers.flatMap((worker) => MODELS.map((model) => rowOf(worker, model)).filter(({ report, path }) => report || path));
    byId("models").closest("section").hidden = shown.length === 0;
    this.#rows.show(shown, ({ id, model }) => `${id} ${model}`);
  }

  redraw() {
    this.#rows.redraw();
  }

  #make({ id, model }) {
    const { title, details, what } = twoLines();
    const state = make("span", { class: "state" });
    const trouble = make("span", { class: "bad" });
    what.append(trouble);
    const load = rowButton("model_load", () => this.#act(() => sendJson(`${PATH}/load`, { worker_id: id }), t("done_loading", { id })));
    const unload = rowButton("model_unload", async () => {
      if (!(await ask({ title: "model_unload_title", text: "model_unload_text", yes: "model_unload", no: "keep" }))) return;
      await this.#act(() => sendJson(`${PATH}/unload`, { worker_id: id, model }), t("done_unloaded", { id }));
    }, true);
    return { title, details, state, trouble, load, unload, children: [what, state, load, unload] };
  }
}

function rowOf(worker, model) {
  const { worker_id: id, state } = worker;
  return { id, state, model, report: worker[model], path: worker[`${model}_path`], error: worker[`${model}_error`] };
}

function update({ title, details, state, trouble, load, unload }, row) {
  const { id, model, report, path, error } = row;
  const isStarting = STARTING.includes(row.state);
  title.textContent = `${id} · ${report?.path ?? path}`;
  state.textContent = t(isStarting ? "model_starting" : report ? "model_loaded" : "model_unloaded");
  state.className = isStarting ? "state wait" : report || !error ? "state" : "state bad";
  details.textContent = report ? [
    model === "speech" ? report.kind : t("model_conversion"),
    t("model_slots", { used: report.slots.total - report.slots.free, total: report.slots.total }),
    ...(model === "speech" ? speechCounts(report) : [t("model_pieces", { n: count(report.pieces) })]),
  ].join(" · ") : "";
  trouble.textContent = error ?? "";
  load.hidden = isStarting || Boolean(report);
  unload.hidden = isStarting || !report;
  const name = model === "speech" ? id : `${id}, ${t("model_conversion")}`;
  nameButton(load, name);
  nameButton(unload, name);
}

function speechCounts(report) {
  return [
    t("model_texts", { n: count(report.texts) }),
    t("model_frames", { n: count(report.frames), late: count(report.late_sounds) }),
    t("model_graphs", { n: report.graphs }),
    ...(report.bytes ? [t("memory_weights", { size: gigabytes(report.bytes) })] : []),
  ];
}
