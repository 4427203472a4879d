/**
 * The language of the page and its texts. The language is the first known one of: `?lang=`, the stored choice, the
 * server's default, the browser's languages.
 */

import { en } from "./texts/en.js";
import { zh } from "./texts/zh.js";

const KEY = "minicpmo_lang";
const TEXTS = { en: { ...en }, zh: { ...zh } };
let current = "en";
const listeners = new Set();

const known = (name) => Object.keys(TEXTS).find((one) => name?.toLowerCase().startsWith(one));

/** Add a page's texts to the shared ones. @param {{en: object, zh: object}} texts with the same keys */
export function addTexts(texts) {
  for (const [name, more] of Object.entries(texts)) Object.assign(TEXTS[name], more);
}

/** @param {string|undefined} serverDefault of `/api/frontend_defaults` */
export function chooseLanguage(serverDefault) {
  const requested = new URLSearchParams(location.search).get("lang");
  const browser = navigator.languages?.find(known);
  setLanguage(known(requested) ?? known(localStorage.getItem(KEY)) ?? known(serverDefault) ?? known(browser) ?? "en");
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
export const hasText = (key) => key in TEXTS[current];

/** A sentence with what stands in braces filled in. */
export function t(key, values = {}) {
  const text = TEXTS[current][key] ?? key;
  return text.replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
}

/** Translate all elements with `data-text` (key of the content) or `data-label` (key of the accessible name). */
export function translate(root) {
  for (const element of root.querySelectorAll("[data-text]")) element.textContent = t(element.dataset.text);
  for (const element of root.querySelectorAll("[data-label]")) label(element, element.dataset.label);
}

/** Set an element's accessible name and tooltip. The key is stored for a change of language. */
export function label(element, key) {
  element.dataset.label = key;
  element.setAttribute("aria-label", t(key));
  if (element.matches("button, a")) element.title = t(key);
}

/** Set an element's text. The key is stored for a change of language. */
export function setText(element, key) {
  element.dataset.text = key;
  element.textContent = t(key);
}

/** Set an element's text to one that has no key. */
export function setPlain(element, text) {
  delete element.dataset.text;
  if (element.textContent !== text) element.textContent = text;
}

/** Seconds as 1:05. */
export function clock(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}
