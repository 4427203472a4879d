/** The list of all recordings, newest first, page by page. */

import { fetchJson } from "../shared/api.js";
import { ask } from "../shared/dialogs.js";
import { byId, make } from "../shared/dom.js";
import { fetchApps, fillHeader } from "../shared/header.js";
import { addTexts, chooseLanguage, onLanguage, setPlain, setText, t } from "../shared/i18n.js";
import { removeRecent } from "../shared/recent.js";
import { applyTheme } from "../shared/theme.js";
import { factsOf, headingOf } from "./names.js";
import { en } from "./texts/en.js";
import { zh } from "./texts/zh.js";

const PER_PAGE = 25;
const apiOf = (id) => `/api/sessions/${encodeURIComponent(id)}`;

addTexts({ en, zh });
applyTheme();
const header = fillHeader(byId("header"), { help: "recordings" });
let page = { total: 0, offset: 0, sessions: [] };

byId("newer").onclick = () => open(page.offset - PER_PAGE).then(() => byId("list").focus());
byId("older").onclick = () => open(page.offset + PER_PAGE).then(() => byId("list").focus());
chooseLanguage();
onLanguage(draw);
fetchApps().then(header.show, () => {}); // without them the header has no links
begin().catch(showError).finally(() => {
  byId("main").removeAttribute("aria-busy");
  window.duologue = { state: "loaded" }; // for tests
});

async function begin() {
  document.title = `${t("recordings")} · Duologue`;
  const { recording } = await fetchJson("/api/frontend_defaults");
  if (recording) await open(0);
  else setText(byId("state"), "recording_off");
}

function showError(error) {
  setPlain(byId("state"), error.message);
}

async function open(offset) {
  try {
    page = await fetchJson(`/api/sessions?offset=${Math.max(0, offset)}&limit=${PER_PAGE}`);
  } catch (error) {
    showError(error);
    return;
  }
  const isPastEnd = page.sessions.length === 0 && page.offset > 0; // the last one of the page was deleted
  if (isPastEnd) await open(page.offset - PER_PAGE);
  else showPage();
}

function showPage() {
  if (!page.total) setText(byId("state"), "no_recordings");
  else setPlain(byId("state"), t("shown_of", { from: page.offset + 1, to: page.offset + page.sessions.length, total: page.total }));
  byId("newer").disabled = page.offset === 0;
  byId("older").disabled = page.offset + page.sessions.length >= page.total;
  byId("pages").hidden = page.total <= PER_PAGE;
  byId("list").replaceChildren(...page.sessions.map(row));
}

function draw() {
  document.title = `${t("recordings")} · Duologue`;
  if (page.total) showPage();
}

function row(meta) {
  const id = meta.session_id;
  const name = headingOf(meta);
  const facts = factsOf(meta).join(" · ");
  const link = make("a", { href: `/s/${encodeURIComponent(id)}` }, make("strong", {}, name), make("span", {}, facts));
  const button = make("button", { class: "button danger", type: "button", "aria-label": t("delete_named", { name: `${name}, ${facts}` }) }, t("delete"));
  button.onclick = () => remove(id);
  return make("li", {}, link, button);
}

async function remove(id) {
  if (!(await ask({ title: "delete_title", text: "delete_text", yes: "delete" }))) return;
  try {
    await fetchJson(apiOf(id), { method: "DELETE" });
    removeRecent(id);
    await open(page.offset);
    byId("list").focus();
  } catch (error) {
    setPlain(byId("state"), t("not_deleted", { reason: error.message }));
  }
}
