/** The home page: ways to talk, state of the server, recent sessions of this browser. */

import { fetchJson } from "../shared/api.js";
import { byId, icon, make } from "../shared/dom.js";
import { fetchApps, fillHeader, takeDisabledApp } from "../shared/header.js";
import { addTexts, chooseLanguage, hasText, label, language, onLanguage, setText, t } from "../shared/i18n.js";
import { recentSessions, removeRecent } from "../shared/recent.js";
import { ServerStatus } from "../shared/server-status.js";
import { applyTheme } from "../shared/theme.js";
import { en } from "./texts/en.js";
import { zh } from "./texts/zh.js";

const ICONS = { omni: "camera", audio_duplex: "mic", half_duplex_audio: "ear", turnbased: "file" };

addTexts({ en, zh });
applyTheme();
const off = takeDisabledApp();
const server = new ServerStatus(() => true, showServer);
fillHeader(byId("header"), { help: "home" });
chooseLanguage();

/** Cards of the enabled apps. */
function showModes(apps) {
  byId("modes").replaceChildren(...apps.map(({ app_id: id, route }) => {
    const [name, about] = [make("strong"), make("span")];
    setText(name, `app_${id}`);
    if (hasText(`about_${id}`)) setText(about, `about_${id}`);
    return make("li", {}, make("a", { href: route + location.search }, icon(ICONS[id] ?? "mic"), name, about));
  }));
  byId("modes-empty").hidden = apps.length > 0;
}

function stateText() {
  const { slots, reason } = server;
  if (reason) return t(`home_${reason}`);
  return slots ? t("home_free", slots) : "";
}

function showServer() {
  const { progress, queueLength } = server;
  const waiting = queueLength > 0 ? t("home_waiting", { n: queueLength }) : "";
  const loading = progress?.what ?? "";
  const text = [stateText(), loading, waiting].filter(Boolean).join(" · ");
  if (byId("state").textContent !== text) byId("state").textContent = text;
  byId("progress").hidden = server.reason !== "loading";
  if (progress?.total) byId("progress").value = progress.done / progress.total;
  else byId("progress").removeAttribute("value");
  byId("random").hidden = !server.randomWeights;
}

function showRecent() {
  const sessions = recentSessions();
  byId("recent-section").hidden = sessions.length === 0;
  const hour = new Intl.DateTimeFormat(language() === "zh" ? "zh-CN" : "en-GB", { dateStyle: "medium", timeStyle: "short" });
  byId("recent").replaceChildren(...sessions.map(({ id, mode, at }) => {
    const date = new Date(at);
    const isDate = !Number.isNaN(date.getTime());
    const name = hasText(`app_${mode}`) ? t(`app_${mode}`) : id;
    const time = isDate ? [make("time", { datetime: date.toISOString() }, hour.format(date))] : [];
    const remove = make("button", { class: "quiet icon", type: "button" }, icon("close"));
    label(remove, "home_forget");
    remove.onclick = () => {
      removeRecent(id);
      showRecent();
      (byId("recent").querySelector("button") ?? byId("modes")).focus();
    };
    return make("li", {}, make("a", { href: `/s/${encodeURIComponent(id)}` }, name, ...time), remove);
  }));
}

function showRest() {
  byId("off").hidden = !off;
  if (off) byId("off").textContent = t("app_off", { name: hasText(`app_${off}`) ? t(`app_${off}`) : off });
  showServer();
  showRecent();
}

async function start() {
  showRest();
  onLanguage(showRest);
  const [defaults, apps] = await Promise.allSettled([fetchJson("/api/frontend_defaults"), fetchApps(), server.refresh()]);
  if (apps.status === "fulfilled") showModes(apps.value);
  else byId("state").textContent = t("home_unreachable");
  if (defaults.status !== "fulfilled") return;
  byId("all-sessions").hidden = !defaults.value.recording;
  if (defaults.value.default_lang) chooseLanguage(defaults.value.default_lang);
}

start().then(() => (document.documentElement.dataset.ready = "yes"));
