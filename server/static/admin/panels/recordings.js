/** Recordings of sessions: view, download, delete. */

import { fetchJson } from "../../shared/api.js";
import { ask } from "../../shared/dialogs.js";
import { byId, make } from "../../shared/dom.js";
import { clock, hasText, setText, t } from "../../shared/i18n.js";
import { dateText } from "../figures.js";
import { nameButton, rowButton, Rows, twoLines } from "../rows.js";

const PAGE = 20;
const MAX = 200; // recordings that the server lists at once

export class Recordings {
  #rows;
  #act;
  #total = null; // null while recording is off
  #limit = PAGE;

  /** @param {(doing: () => Promise<any>, done: string) => Promise<void>} act */
  constructor(act) {
    this.#act = act;
    this.#rows = new Rows(byId("recordings"), (one) => this.#make(one), update);
    byId("recordings-more").onclick = () => {
      this.#limit = Math.min(this.#limit + PAGE, MAX);
      this.refresh();
    };
  }

  async refresh() {
    const { recording } = await fetchJson("/api/frontend_defaults");
    const { total, sessions } = recording ? await fetchJson(`/api/sessions?limit=${this.#limit}`) : { total: null, sessions: [] };
    this.#total = total;
    this.#rows.show(sessions, idOf);
    byId("recordings-more").hidden = total === null || sessions.length >= Math.min(total, MAX);
    this.redraw();
  }

  redraw() {
    this.#rows.redraw();
    byId("recordings-state").textContent = this.#total === null ? t("recordings_off") : t("recordings_total", { n: this.#total });
  }

  #make(meta) {
    const id = idOf(meta);
    const path = encodeURIComponent(id);
    const { title, details, what } = twoLines();
    const view = make("a", { class: "button", href: `/s/${path}` });
    const save = make("a", { class: "button", href: `/api/sessions/${path}/download`, download: `${id}.zip` });
    setText(view, "view");
    setText(save, "download");
    const remove = rowButton("delete", async () => {
      if (!(await ask({ title: "recording_delete_title", text: "recording_delete_text", yes: "delete", no: "keep" }))) return;
      await this.#act(() => fetchJson(`/api/sessions/${path}`, { method: "DELETE" }), t("done_deleted", { name: id }));
    }, true);
    return { title, details, view, save, remove, children: [what, view, save, remove] };
  }
}

const idOf = ({ session_id: id, id: other }) => id ?? other;

function update({ title, details, view, save, remove }, meta) {
  const { app_type: kind } = meta;
  title.textContent = meta.title || (hasText(`kind_${kind}`) ? t(`kind_${kind}`) : (kind ?? idOf(meta)));
  details.textContent = [
    dateText(meta.created_at),
    ...(meta.duration_s === null || meta.duration_s === undefined ? [] : [clock(meta.duration_s)]),
    idOf(meta),
  ].join(" · ");
  for (const button of [view, save, remove]) nameButton(button, `${title.textContent}, ${dateText(meta.created_at)}`);
}
