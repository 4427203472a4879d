/**
 * Which language the page speaks, and its sentences in it. Chosen by `?lang=`, then by what was chosen before, then by
 * the server, then by the browser.
 */

import { WORDS } from "./words.js";

const KEY = "minicpmo_lang";
let current = "en";
const listeners = new Set();

const known = (name) => Object.keys(WORDS).find((one) => name?.toLowerCase().startsWith(one));

/** @param {string|undefined} serverDefault of `/api/frontend_defaults` */
export function chooseLanguage(serverDefault) {
  const asked = new URLSearchParams(location.search).get("lang");
  const browser = navigator.languages?.find(known);
  setLanguage(known(asked) ?? known(localStorage.getItem(KEY)) ?? known(serverDefault) ?? known(browser) ?? "en");
}

export function setLanguage(name, remember = false) {
  current = name;
  if (remember) localStorage.setItem(KEY, name);
  document.documentElement.lang = name === "zh" ? "zh-CN" : name;
  translate(document);
  for (const listener of listeners) listener();
}

export const language = () => current;
export const onLanguage = (listener) => listeners.add(listener);
export const has = (key) => key in WORDS[current];

/** A sentence with what stands in braces filled in. */
export function say(key, values = {}) {
  const text = WORDS[current][key] ?? key;
  return text.replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
}

/** Elements say which sentence they hold in `data-say`, and which one is their name in `data-label`. */
export function translate(root) {
  for (const element of root.querySelectorAll("[data-say]")) element.textContent = say(element.dataset.say);
  for (const element of root.querySelectorAll("[data-label]")) label(element, element.dataset.label);
}

/** Name an element for screen readers and as a tooltip; remembered for the next language. */
export function label(element, key) {
  element.dataset.label = key;
  element.setAttribute("aria-label", say(key));
  if (element.matches("button, a")) element.title = say(key);
}

/** Set an element's sentence; remembered for the next language. */
export function tell(element, key) {
  element.dataset.say = key;
  element.textContent = say(key);
}

/** Seconds as 1:05. */
export function clock(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}
