/** The speech models of the workers: state and counters, and buttons that load and unload them. */

import { fetchJson, sendJson } from "../../shared/api.js";
import { ask } from "../../shared/dialogs.js";
import { byId, make } from "../../shared/dom.js";
import { t } from "../../shared/i18n.js";
import { count, gigabytes } from "../figures.js";
import { nameButton, rowButton, Rows, twoLines } from "../rows.js";

const PATH = "/api/admin/models";
const STARTING = ["LOADING", "COMPILING", "WARMING_UP"];

export class Models {
  #rows;
  #act;

  /** @param {(doing: () => Promise<any>, done: string) => Promise<void>} act runs an action, reports it and refreshes */
  constructor(act) {
    this.#act = act;
    this.#rows = new Rows(byId("models"), (worker) => this.#make(worker), update);
  }

  /** Workers without a speech model in their settings have no row; without any row the section is hidden. */
  async refresh() {
    const { workers } = await fetchJson(PATH);
    const shown = workers.filter(({ speech, speech_path: path }) => speech || path);
    byId("models").closest("section").hidden = shown.length === 0;
    this.#rows.show(shown, ({ worker_id: id }) => id);
  }

  redraw() {
    this.#rows.redraw();
  }

  #make({ worker_id: id }) {
    const { title, details, what } = twoLines();
    const state = make("span", { class: "state" });
    const trouble = make("span", { class: "bad" });
    what.append(trouble);
    const load = rowButton("model_load", () => this.#act(() => sendJson(`${PATH}/load`, { worker_id: id }), t("done_loading", { id })));
    const unload = rowButton("model_unload", async () => {
      if (!(await ask({ title: "model_unload_title", text: "model_unload_text", yes: "model_unload", no: "keep" }))) return;
      await this.#act(() => sendJson(`${PATH}/unload`, { worker_id: id, model: "speech" }), t("done_unloaded", { id }));
    }, true);
    return { title, details, state, trouble, load, unload, children: [what, state, load, unload] };
  }
}

function update({ title, details, state, trouble, load, unload }, worker) {
  const { worker_id: id, speech, speech_path: path, speech_error: error } = worker;
  const isStarting = STARTING.includes(worker.state);
  title.textContent = `${id} · ${speech?.path ?? path}`;
  state.textContent = t(isStarting ? "model_starting" : speech ? "model_loaded" : "model_unloaded");
  state.className = isStarting ? "state wait" : speech || !error ? "state" : "state bad";
  details.textContent = speech ? [
    speech.kind,
    t("model_slots", { used: speech.slots.total - speech.slots.free, total: speech.slots.total }),
    t("model_texts", { n: count(speech.texts) }),
    t("model_frames", { n: count(speech.frames), late: count(speech.late_sounds) }),
    t("model_graphs", { n: speech.graphs }),
    ...(speech.bytes ? [t("memory_weights", { size: gigabytes(speech.bytes) })] : []),
  ].join(" · ") : "";
  trouble.textContent = error ?? "";
  load.hidden = isStarting || Boolean(speech);
  unload.hidden = isStarting || !speech;
  nameButton(load, id);
  nameButton(unload, id);
}
