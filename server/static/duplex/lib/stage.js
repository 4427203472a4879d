/** The stage: badge, card, notice, controls and level meters for each state of a conversation. */

import { clock, hasText, label, setText, t } from "./i18n.js";
import { couldReconnect } from "./errors.js";

const LIVE = ["listening", "speaking", "paused"];
const NOTICE_MS = 7000;
const QUIET_DB = -60;
const byId = (id) => document.getElementById(id);

export class Stage {
  #stage = byId("stage");
  #voiceOnly;
  #details = {};
  #state = "idle";
  #dueAt = 0; // expected end of the wait or the pause, on the clock of performance.now()
  #durationS = 0;
  #noticeTimer = 0;
  #levels = new Map();

  constructor(voiceOnly) {
    this.#voiceOnly = voiceOnly;
    setInterval(() => this.#tick(), 500);
  }

  /**
   * state: of a conversation, or "disabled" if the server has disabled this kind. details: of the queue, the pause or
   * the error; `durationS` of a conversation that has ended; `other`, the kind that is offered instead.
   */
  show(state, details = {}) {
    const before = this.#state;
    if (state === "queued" || (state === "paused" && details.timeout)) this.#wait(details, before);
    if (state === "paused" && before !== "paused" && !details.timeout) this.#dueAt = 0;
    if (details.durationS) this.#durationS = details.durationS;
    this.#state = state;
    if (state !== before || state === "disabled" || details.position || details.code) this.#details = details;
    this.#stage.dataset.state = state;
    this.#stage.classList.toggle("live", LIVE.includes(state));
    setText(byId("badge-text"), `state_${state}`);
    this.redraw();
  }

  /** Move the countdown half way to a new estimate, so that it does not jump. */
  #wait(details, before) {
    const due = performance.now() + 1000 * (details.estimated_wait_s ?? details.timeout);
    this.#dueAt = this.#dueAt && before === this.#state && this.#state === "queued" ? (this.#dueAt + due) / 2 : due;
  }

  get #left() {
    return Math.max(0, (this.#dueAt - performance.now()) / 1000);
  }

  #tick() {
    if (this.#state === "queued" || this.#state === "paused") this.redraw();
  }

  redraw() {
    const { title, text, action, calm = false } = this.#card();
    const fill = (id, words) => {
      if (byId(id).textContent !== words) byId(id).textContent = words;
    };
    fill("card-title", title);
    fill("card-text", text);
    const button = byId("card-action");
    button.hidden = !action;
    button.classList.toggle("calm", calm);
    if (action) setText(button, action);
    const isPaused = this.#state === "paused";
    const pause = byId("pause");
    setText(pause.querySelector("span"), isPaused ? "resume" : "pause");
    label(pause, isPaused ? "resume" : "pause");
    pause.querySelector("use").setAttribute("href", isPaused ? "#i-play" : "#i-pause");
    byId("interrupt").disabled = isPaused;
  }

  /** Content of the card in the middle; empty while listening and speaking. */
  #card() {
    const kind = this.#voiceOnly ? "audio" : "omni";
    switch (this.#state) {
      case "idle":
        return { title: t(`welcome_${kind}`), text: t(`welcome_text_${kind}`), action: "start" };
      case "disabled": {
        const { other } = this.#details;
        const text = t(other ? "off_text_other" : "off_text");
        return { title: t(`off_title_${kind}`), text, action: other ? `off_go_${other}` : "off_again" };
      }
      case "asking":
        return { title: t("asking_title"), text: t(`asking_text_${kind}`), action: "cancel", calm: true };
      case "queued": {
        const wait = this.#left < 3 ? t("queued_soon") : t("queued_text", { time: clock(this.#left) });
        return { title: t("queued_title", this.#details), text: wait, action: "cancel", calm: true };
      }
      case "connecting":
      case "preparing":
        return { title: t(`${this.#state}_title`), text: "", action: "cancel", calm: true };
      case "paused": {
        const text = this.#dueAt ? t("paused_text", { time: clock(this.#left) }) : "";
        return { title: t("paused_title"), text, action: "resume" };
      }
      case "ended":
        return { title: t("ended_title"), text: t("ended_text", { time: clock(this.#durationS) }), action: "again" };
      case "failed":
        return { ...this.#error(), action: couldReconnect(this.#details.code) ? "reconnect" : "start" };
      default:
        return { title: "", text: "", action: null };
    }
  }

  #error() {
    const { code, text = "" } = this.#details;
    const key = hasText(`error_${code}`) ? `error_${code}` : "error_other";
    return { title: t(key), text: t(hasText(`${key}_text`) ? `${key}_text` : "error_other_text", { text }) };
  }

  /** Show a text for a few seconds. */
  notice(text) {
    clearTimeout(this.#noticeTimer);
    byId("notice").textContent = text;
    this.#noticeTimer = setTimeout(() => (byId("notice").textContent = ""), NOTICE_MS);
  }

  showCamera(on) {
    this.#stage.classList.toggle("with-camera", on);
    this.#toggle("camera", !on, on ? "camera_off" : "camera_on", on ? "#i-camera" : "#i-camera-off", "camera");
  }

  showMuted(on) {
    this.#toggle("mute", on, on ? "unmute" : "mute", on ? "#i-mic-off" : "#i-mic");
    const extra = byId("badge-extra");
    if (on) setText(extra, "muted");
    else {
      delete extra.dataset.text;
      extra.textContent = "";
    }
  }

  showHold(on) {
    byId("listen").setAttribute("aria-pressed", on);
  }

  /** key: of the accessible name. shown: key of the text under the icon. */
  #toggle(id, pressed, key, icon, shown = key) {
    const button = byId(id);
    button.setAttribute("aria-pressed", pressed);
    setText(button.querySelector("span"), shown);
    label(button, key);
    button.querySelector("use").setAttribute("href", icon);
  }

  /** Update a level meter, which has a decibel scale. source: "mic" or "model". rms: relative to full scale. */
  level(source, rms) {
    const share = Math.max(0, Math.min(1, 1 - (20 * Math.log10(rms + 1e-9) + 6) / (QUIET_DB + 6)));
    const shown = Math.round(50 * share) / 50;
    if (this.#levels.get(source) === shown) return; // nothing to repaint
    this.#levels.set(source, shown);
    byId(`${source}-level`).style.transform = `scaleX(${shown})`;
    if (this.#stage.classList.contains("with-camera")) return;
    byId(`orb-${source}`).style.transform = `scale(${1 + 0.35 * shown})`;
  }
}
