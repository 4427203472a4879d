/** What the server says about itself: whether it is ready, loading or full, and whether its model is a real one. */

import { fetchJson } from "./api.js";

const POLL_MS = 3000;

/** @param {object} status of GET /status @returns {"busy"|"loading"|"no_worker"|null} why no slot is free; null: one is */
export function reasonOf(status) {
  if (status.reason) return status.reason;
  if (status.slots?.free > 0) return null;
  if (status.slots?.total > 0) return "busy";
  return status.loading_workers > 0 ? "loading" : "no_worker";
}

export class ServerStatus {
  #changed;
  #wanted;
  reason = null;
  progress = null; // {what, done, total} while loading
  randomWeights = false;
  slots = null; // {total, free}
  queueLength = 0;

  /** @param {() => boolean} wanted whether to ask now @param {() => void} changed */
  constructor(wanted, changed) {
    this.#wanted = wanted;
    this.#changed = changed;
    setInterval(() => !document.hidden && wanted() && this.refresh(), POLL_MS);
  }

  async refresh() {
    try {
      const status = await fetchJson("/status");
      this.reason = reasonOf(status);
      this.slots = status.slots ?? null;
      this.queueLength = status.queue_length ?? 0;
      this.randomWeights = status.random_weights === true;
      this.progress = status.progress ?? (this.reason === "loading" ? await loadingProgress() : null);
    } catch {
      return; // the server is away; the conversation reports it
    }
    this.#changed();
  }
}

/** Progress of the worker that is nearest to its end. */
async function loadingProgress() {
  const { workers } = await fetchJson("/workers");
  const found = workers.filter((one) => one.status === "loading" && one.progress).map((one) => one.progress);
  const share = ({ done, total }) => (total ? done / total : 0);
  return found.sort((a, b) => share(b) - share(a))[0] ?? null;
}
