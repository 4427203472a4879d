/** The page of one recorded session: loads it and creates the parts of the page. */

import { fetchJson } from "../shared/api.js";
import { ask } from "../shared/dialogs.js";
import { byId } from "../shared/dom.js";
import { fetchApps, fillHeader } from "../shared/header.js";
import { addTexts, chooseLanguage, onLanguage, setPlain, setText, t } from "../shared/i18n.js";
import { removeRecent } from "../shared/recent.js";
import { applyTheme } from "../shared/theme.js";
import { Comment } from "./comment.js";
import { showDetails } from "./details.js";
import { Entries } from "./entries.js";
import { factsOf, headingOf } from "./names.js";
import { Replay } from "./replay/replay.js";
import { en } from "./texts/en.js";
import { zh } from "./texts/zh.js";

const POLL_MS = 2000; // while the server makes the files
const LIST = "/recordings";
const id = decodeURIComponent(location.pathname.split("/").at(-1));
const api = `/api/sessions/${encodeURIComponent(id)}`;
const asset = (path) => `${api}/assets/${path.split("/").map(encodeURIComponent).join("/")}`;

addTexts({ en, zh });
applyTheme();
const header = fillHeader(byId("header"), { help: "recordings" });
const replay = new Replay((seconds) => entries.markAt(seconds));
const entries = new Entries(asset, (seconds) => replay.play(seconds));
const comment = new Comment(api);
let meta = null;

byId("download").href = `${api}/download`;
byId("copy").onclick = copyLink;
byId("delete").onclick = remove;
chooseLanguage();
onLanguage(showMeta);
fetchApps().then(header.show, () => {}); // without them the header has no links
load().catch(showError).finally(() => {
  byId("main").removeAttribute("aria-busy");
  window.duologue = { state: "loaded" }; // for tests
});

function showError(error) {
  setPlain(byId("state"), error.message);
}

async function load() {
  const [, { is_complete: isComplete, replays }] = await Promise.all([loadMeta(), fetchJson(`${api}/replays`), comment.load()]);
  showUploaded(replays);
  if (isComplete) await showRecording(replays);
  else waitUntilComplete().catch(showError);
}

async function loadMeta() {
  meta = await fetchJson(api);
  showMeta();
}

function showMeta() {
  if (!meta) return;
  setPlain(byId("heading"), headingOf(meta));
  document.title = `${headingOf(meta)} · Duologue`;
  setPlain(byId("facts"), factsOf(meta).join(" · "));
  showDetails(meta);
}

async function waitUntilComplete() {
  for (;;) {
    setText(byId("state"), meta.ended_at ? "being_made" : "in_progress");
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    const { is_complete: isComplete, replays } = await fetchJson(`${api}/replays`);
    await loadMeta();
    if (!isComplete) continue;
    setPlain(byId("state"), "");
    await showRecording(replays);
    return;
  }
}

async function showRecording(replays) {
  const recording = await fetchJson(`${api}/recording`);
  entries.show(recording);
  const video = replays.find((name) => name === "merged_replay.mp4");
  const sound = replays.find((name) => name === "merged_replay.wav");
  if (sound) await replay.open(asset(sound), video && asset(video));
}

function showUploaded(replays) {
  const name = replays.find((one) => one.startsWith("frontend_replay."));
  if (!name) return;
  const media = byId("uploaded-media");
  media.onloadedmetadata = () => media.classList.toggle("sound", !media.videoWidth);
  media.src = asset(name);
  byId("uploaded").hidden = false;
}

async function copyLink() {
  const link = new URL(`/s/${encodeURIComponent(id)}`, location.href).href;
  try {
    await navigator.clipboard.writeText(link);
    setText(byId("state"), "link_copied");
  } catch {
    setPlain(byId("state"), link); // browsers give access to the clipboard only to https and localhost
  }
}

async function remove() {
  if (!(await ask({ title: "delete_title", text: "delete_text", yes: "delete" }))) return;
  try {
    await fetchJson(api, { method: "DELETE" });
    removeRecent(id);
    location.replace(LIST);
  } catch (error) {
    setPlain(byId("state"), t("not_deleted", { reason: error.message }));
  }
}
