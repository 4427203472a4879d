/** The stage: card, notice, orb and level meters for each state of a conversation, and where the focus goes. */

import { byId, make } from "../../shared/dom.js";
import { setPlain, setText, t } from "../../shared/i18n.js";
import { showBadge, showTimer } from "./badges.js";
import { cardOf } from "./card.js";

const LIVE = ["listening", "speaking", "paused"];
const COUNTED = ["queued", "paused", "reconnecting"];
const NOTICE_MS = 7000;
const QUIET_DB = -60;

export class Stage {
  #stage = byId("stage");
  #kind;
  #server;
  #toolbar;
  #details = {};
  #state = "idle";
  #dueAt = 0; // expected end of the wait or the pause, on the clock of performance.now()
  #startedAt = null; // of the conversation
  #durationS = 0;
  #noticeTimer = 0;
  #levels = new Map();
  onTick = () => {};

  /** kind: "omni" or "audio". server: ServerStatus. toolbar: Toolbar, which gets the focus after the start */
  constructor(kind, server, toolbar) {
    this.#kind = kind;
    this.#server = server;
    this.#toolbar = toolbar;
    setInterval(() => this.#tick(), 500);
  }

  get state() {
    return this.#state;
  }

  /**
   * state: of a conversation, or "disabled" if the server has disabled this kind. details: of the queue, the pause or
   * the error; `other`, the kind that is offered instead.
   */
  show(state, details = {}) {
    const before = this.#state;
    const hadFocus = this.#stage.contains(document.activeElement);
    this.#count(state, details, before);
    if (state === "listening") this.#startedAt ??= performance.now();
    if (["ended", "failed"].includes(state)) {
      this.#durationS = this.#seconds ?? 0;
      this.#startedAt = null;
      if (state === "ended" && !this.#durationS) state = "idle"; // cancelled before the start
    }
    this.#state = state;
    if (state !== before || state === "disabled" || details.position || details.code) this.#details = details;
    this.#stage.dataset.state = state;
    this.#stage.classList.toggle("live", LIVE.includes(state));
    showBadge(state, this.#details.code);
    byId("interrupt").disabled = state === "paused";
    this.redraw();
    if (hadFocus) this.#moveFocus();
  }

  /** Seconds since the conversation started; null before and after it. */
  get #seconds() {
    return this.#startedAt === null ? null : (performance.now() - this.#startedAt) / 1000;
  }

  /** Move the countdown half way to a new estimate of the queue, so that it does not jump. */
  #count(state, details, before) {
    const seconds = details.delayS ?? details.estimated_wait_s ?? details.timeout;
    if (state !== before) this.#dueAt = 0;
    if (!COUNTED.includes(state) || seconds === undefined) return;
    const due = performance.now() + 1000 * seconds;
    this.#dueAt = this.#dueAt && state === "queued" ? (this.#dueAt + due) / 2 : due;
  }

  get #leftS() {
    return Math.max(0, (this.#dueAt - performance.now()) / 1000);
  }

  #tick() {
    if (COUNTED.includes(this.#state)) this.redraw();
    showTimer(this.#seconds);
    this.onTick();
  }

  /** The focused control disappeared: continue at the control that replaces it. */
  #moveFocus() {
    const focused = document.activeElement;
    if (focused && focused !== document.body && focused.getClientRects().length && !focused.disabled) return;
    // At this button Space interrupts, as it does where no control has the focus.
    if (["listening", "speaking"].includes(this.#state)) this.#toolbar.focus(byId("interrupt"));
    else byId("card-action").focus();
  }

  redraw() {
    const facts = { kind: this.#kind, details: this.#details, leftS: this.#leftS, durationS: this.#durationS };
    const { title, text, action, calm = false, progress } = cardOf(this.#state, { ...facts, server: this.#server });
    setPlain(byId("card-title"), title);
    setPlain(byId("card-text"), text);
    const bar = byId("card-progress");
    bar.hidden = progress === undefined;
    if (progress === null) bar.removeAttribute("value");
    else if (progress !== undefined) bar.value = progress;
    const button = byId("card-action");
    button.hidden = !action;
    button.classList.toggle("calm", calm);
    if (action) setText(button, action);
    setPlain(byId("card-hint"), this.#hint());
    this.#toolbar.refresh();
  }

  #hint() {
    if (this.#state !== "idle") return "";
    const { slots, reason } = this.#server;
    const place = slots?.free > 0 ? t("places", slots) : reason ? t(`places_${reason}`) : "";
    return `${place} ${t("headphones")}`.trim();
  }

  /** Further buttons under the main one. @param {{key: string, act: () => void}[]} buttons */
  offer(buttons) {
    byId("card-more").replaceChildren(...buttons.map(({ key, act }) => {
      const button = make("button", { type: "button", class: "button", onclick: act });
      setText(button, key);
      return button;
    }));
  }

  /** Show a text for a few seconds. */
  notice(text) {
    clearTimeout(this.#noticeTimer);
    byId("notice").textContent = text;
    this.#noticeTimer = setTimeout(() => (byId("notice").textContent = ""), NOTICE_MS);
  }

  /** Whether there are pictures, or the orb takes their place. */
  showPicture(on) {
    this.#stage.classList.toggle("with-camera", on);
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
