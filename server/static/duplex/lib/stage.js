/**
 * The stage: badge, card, notice, controls and meters for each state of a conversation.
 *
 * Knows elements and sentences. Does not know sound, sockets or settings.
 */

import { clock, has, label, say, tell } from "./i18n.js";
import { hasBegun } from "./trouble.js";

const LIVE = ["listening", "speaking", "paused"];
const NOTICE_MS = 7000;
const QUIET_DB = -60;
const byId = (id) => document.getElementById(id);

export class Stage {
  #stage = byId("stage");
  #voiceOnly;
  #details = {};
  #state = "idle";
  #due = 0; // when the queue's wait or the pause is over, by performance.now()
  #lasted = 0;
  #noticeTimer = 0;
  #levels = new Map();

  constructor(voiceOnly) {
    this.#voiceOnly = voiceOnly;
    setInterval(() => this.#tick(), 500);
  }

  /**
   * state: of a conversation, or "off" where the server offers none of this kind. details: of the queue, the pause or
   * the trouble; `lasted` in seconds when a conversation is over; `other`, the kind that is offered instead.
   */
  show(state, details = {}) {
    const before = this.#state;
    if (state === "queued" || (state === "paused" && details.timeout)) this.#wait(details, before);
    if (state === "paused" && before !== "paused" && !details.timeout) this.#due = 0;
    if (details.lasted) this.#lasted = details.lasted;
    this.#state = state;
    if (state !== before || state === "off" || details.position || details.code) this.#details = details;
    this.#stage.dataset.state = state;
    this.#stage.classList.toggle("live", LIVE.includes(state));
    tell(byId("badge-text"), `state_${state}`);
    this.redraw();
  }

  /** A new estimate moves the countdown half of the way, so that it does not jump. */
  #wait(details, before) {
    const due = performance.now() + 1000 * (details.estimated_wait_s ?? details.timeout);
    this.#due = this.#due && before === this.#state && this.#state === "queued" ? (this.#due + due) / 2 : due;
  }

  get #left() {
    return Math.max(0, (this.#due - performance.now()) / 1000);
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
    if (action) tell(button, action);
    const isPaused = this.#state === "paused";
    const pause = byId("pause");
    tell(pause.querySelector("span"), isPaused ? "resume" : "pause");
    label(pause, isPaused ? "resume" : "pause");
    pause.querySelector("use").setAttribute("href", isPaused ? "#i-play" : "#i-pause");
    byId("interrupt").disabled = isPaused;
  }

  /** What the card in the middle says; while listening and speaking there is none. */
  #card() {
    const kind = this.#voiceOnly ? "audio" : "omni";
    switch (this.#state) {
      case "idle":
        return { title: say(`welcome_${kind}`), text: say(`welcome_text_${kind}`), action: "start" };
      case "off": {
        const { other } = this.#details;
        const text = say(other ? "off_text_other" : "off_text");
        return { title: say(`off_title_${kind}`), text, action: other ? `off_go_${other}` : "off_again" };
      }
      case "asking":
        return { title: say("asking_title"), text: say(`asking_text_${kind}`), action: "cancel", calm: true };
      case "queued": {
        const wait = this.#left < 3 ? say("queued_soon") : say("queued_text", { time: clock(this.#left) });
        return { title: say("queued_title", this.#details), text: wait, action: "cancel", calm: true };
      }
      case "connecting":
      case "preparing":
        return { title: say(`${this.#state}_title`), text: "", action: "cancel", calm: true };
      case "paused": {
        const text = this.#due ? say("paused_text", { time: clock(this.#left) }) : "";
        return { title: say("paused_title"), text, action: "resume" };
      }
      case "ended":
        return { title: say("ended_title"), text: say("ended_text", { time: clock(this.#lasted) }), action: "again" };
      case "failed":
        return { ...this.#trouble(), action: hasBegun(this.#details.code) ? "reconnect" : "start" };
      default:
        return { title: "", text: "", action: null };
    }
  }

  #trouble() {
    const { code, text = "" } = this.#details;
    const key = has(`trouble_${code}`) ? `trouble_${code}` : "trouble_other";
    return { title: say(key), text: say(has(`${key}_text`) ? `${key}_text` : "trouble_other_text", { text }) };
  }

  /** A sentence that goes away by itself. */
  notice(text) {
    clearTimeout(this.#noticeTimer);
    byId("notice").textContent = text;
    this.#noticeTimer = setTimeout(() => (byId("notice").textContent = ""), NOTICE_MS);
  }

  pictured(on) {
    this.#stage.classList.toggle("pictured", on);
    this.#toggle("camera", !on, on ? "camera_off" : "camera_on", on ? "#i-camera" : "#i-camera-off", "camera");
  }

  muted(on) {
    this.#toggle("mute", on, on ? "unmute" : "mute", on ? "#i-mic-off" : "#i-mic");
    const extra = byId("badge-extra");
    if (on) tell(extra, "muted");
    else {
      delete extra.dataset.say;
      extra.textContent = "";
    }
  }

  holding(on) {
    byId("listen").setAttribute("aria-pressed", on);
  }

  /** key: of its name for screen readers; shown: of what is under the icon. */
  #toggle(id, pressed, key, icon, shown = key) {
    const button = byId(id);
    button.setAttribute("aria-pressed", pressed);
    tell(button.querySelector("span"), shown);
    label(button, key);
    button.querySelector("use").setAttribute("href", icon);
  }

  /** who: "mic" or "model". rms: of full scale. Shown in decibels, as loudness is heard. */
  level(who, rms) {
    const share = Math.max(0, Math.min(1, 1 - (20 * Math.log10(rms + 1e-9) + 6) / (QUIET_DB + 6)));
    const shown = Math.round(50 * share) / 50;
    if (this.#levels.get(who) === shown) return; // nothing to repaint
    this.#levels.set(who, shown);
    byId(`${who}-level`).style.transform = `scaleX(${shown})`;
    if (!this.#stage.classList.contains("pictured")) byId(`orb-${who}`).style.transform = `scale(${1 + 0.35 * shown})`;
  }
}
