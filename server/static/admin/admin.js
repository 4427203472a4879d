/** The page for administration: refreshes its panels and runs their actions. */

import { fetchJson } from "../shared/api.js";
import { closable } from "../shared/dialogs.js";
import { byId } from "../shared/dom.js";
import { fetchApps, fillHeader } from "../shared/header.js";
import { addTexts, chooseLanguage, onLanguage, setPlain, t } from "../shared/i18n.js";
import { applyTheme } from "../shared/theme.js";
import { Metrics } from "./metrics-text.js";
import { Presets, Voices } from "./panels/library.js";
import { Models } from "./panels/models.js";
import { Overview } from "./panels/overview.js";
import { Queue } from "./panels/queue.js";
import { Recordings } from "./panels/recordings.js";
import { Eta, Switches } from "./panels/switches.js";
import { Workers } from "./panels/workers.js";
import { en } from "./texts/en.js";
import { zh } from "./texts/zh.js";

const REFRESH_MS = 5000;
const SLOW_EVERY = 6; // refreshes between two of what rarely changes

addTexts({ en, zh });
applyTheme();
const header = fillHeader(byId("header"), { current: "admin", help: "admin" });
chooseLanguage();

const overview = new Overview();
const workers = new Workers();
const models = new Models(act);
const queue = new Queue(act);
const slow = [new Switches(act), new Eta(act), new Voices(act), new Presets(), new Recordings(act)];
const panels = [overview, workers, models, queue, ...slow];
let round = 0;
let isRefreshing = false;
let trouble = null; // message of the last failure

async function refreshFast() {
  const [status, listed, waiting, live, text] = await Promise.all([
    fetchJson("/status"), fetchJson("/workers"), fetchJson("/api/queue"), fetchJson("/sessions"),
    fetch("/metrics").then((response) => (response.ok ? response.text() : Promise.reject(new Error(`/metrics: ${response.status}`)))),
  ]);
  const metrics = new Metrics(text);
  overview.show(status, metrics);
  workers.show(listed.workers, metrics);
  queue.show(waiting, live.sessions);
}

/** Refresh everything, or only what changes quickly. A refresh during another one is left out. */
async function refresh(all = false) {
  if (isRefreshing) return;
  isRefreshing = true;
  const jobs = [refreshFast(), models.refresh(), ...(all ? slow.map((panel) => panel.refresh()) : [])];
  const failed = (await Promise.allSettled(jobs)).find(({ status }) => status === "rejected");
  isRefreshing = false;
  showTrouble(failed ? t("trouble", { text: failed.reason.message }) : null);
  if (!failed) setPlain(byId("fresh"), t("fresh", { time: new Date().toLocaleTimeString() }));
}

function showTrouble(text) {
  if (text === trouble) return; // a screen reader hears it once
  trouble = text;
  byId("trouble").hidden = !text;
  byId("trouble").textContent = text ?? "";
}

/** Run an action of a panel and report how it went. */
async function act(doing, done) {
  byId("said").textContent = "";
  try {
    const answer = await doing();
    if (answer?.success === false) throw new Error(t("too_late"));
    byId("said").textContent = done;
    await refresh(true);
  } catch (error) {
    await refresh(true);
    showTrouble(t("failed", { text: error.message }));
  }
}

onLanguage(() => panels.forEach((panel) => panel.redraw()));
closable(byId("report"));
setInterval(() => !document.hidden && refresh(++round % SLOW_EVERY === 0), REFRESH_MS);
document.addEventListener("visibilitychange", () => !document.hidden && refresh(true));
fetchApps().then(header.show, () => {}); // the failure of the refresh is shown
refresh(true).then(() => (document.documentElement.dataset.ready = "yes"));
