/** Waiting tickets, which can be cancelled, and live sessions, which can be ended. */

import { fetchJson } from "../../shared/api.js";
import { ask } from "../../shared/dialogs.js";
import { byId } from "../../shared/dom.js";
import { clock, hasText, t } from "../../shared/i18n.js";
import { nameButton, rowButton, Rows, twoLines } from "../rows.js";

const kindText = (kind) => (hasText(`kind_${kind}`) ? t(`kind_${kind}`) : kind);

export class Queue {
  #waiting;
  #live;
  #act;

  /** @param {(doing: () => Promise<any>, done: string) => Promise<void>} act runs an action, reports it and refreshes */
  constructor(act) {
    this.#act = act;
    this.#waiting = new Rows(byId("queue"), (item) => this.#makeWaiting(item), updateWaiting, byId("queue-empty"));
    this.#live = new Rows(byId("sessions"), (item) => this.#makeLive(item), updateLive, byId("sessions-empty"));
  }

  /** @param {object} queue of GET /api/queue @param {object[]} sessions of GET /sessions */
  show(queue, sessions) {
    this.#waiting.show(queue.items, ({ ticket_id: id }) => id);
    const queued = new Set(queue.items.map(({ session_id: id }) => id));
    const running = new Map(queue.running_tasks.map((task) => [task.session_id, task]));
    const live = sessions.filter(({ session_id: id, worker_id: worker }) => worker || !queued.has(id));
    this.#live.show(live.map((one) => ({ ...one, task: running.get(one.session_id) })), ({ session_id: id }) => id);
  }

  redraw() {
    this.#waiting.redraw();
    this.#live.redraw();
  }

  #makeWaiting({ ticket_id: id, session_id: session }) {
    const { title, details, what } = twoLines();
    const cancel = rowButton("queue_cancel", async () => {
      if (!(await ask({ title: "queue_cancel_title", text: "queue_cancel_text", yes: "queue_cancel", no: "keep" }))) return;
      await this.#act(() => fetchJson(`/api/queue/${encodeURIComponent(id)}`, { method: "DELETE" }), t("done_cancelled", { id: session }));
    }, true);
    return { title, details, cancel, children: [what, cancel] };
  }

  #makeLive({ session_id: id }) {
    const { title, details, what } = twoLines();
    const end = rowButton("session_end", async () => {
      if (!(await ask({ title: "session_end_title", text: "session_end_text", yes: "session_end", no: "keep" }))) return;
      await this.#act(() => fetchJson(`/sessions/${encodeURIComponent(id)}`, { method: "DELETE" }), t("done_ended", { id }));
    }, true);
    return { title, details, end, children: [what, end] };
  }
}

function updateWaiting({ title, details, cancel }, item) {
  title.textContent = `${item.position}. ${item.session_id}`;
  details.textContent = [
    kindText(item.request_type),
    t("queue_waits", { time: clock(item.wait_elapsed_s) }),
    t("queue_left", { time: clock(item.estimated_wait_s) }),
  ].join(" · ");
  nameButton(cancel, item.session_id);
}

function updateLive({ title, details, end }, { session_id: id, kind, worker_id: worker, task }) {
  title.textContent = id;
  details.textContent = [
    kindText(task?.request_type ?? kind),
    worker ?? t("session_no_slot"),
    ...(task ? [t("session_for", { time: clock(task.elapsed_s) }), t("queue_left", { time: clock(task.estimated_remaining_s) }), t("session_units", { n: task.units })] : []),
    ...(task?.paused ? [t("session_paused")] : []),
  ].join(" · ");
  nameButton(end, id);
}
