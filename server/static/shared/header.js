/** The header of every page: home, links to the enabled apps, color scheme, language, and the page's own buttons. */

import { fetchJson } from "./api.js";
import { icon, make } from "./dom.js";
import { helpButton } from "./help.js";
import { hasText, label, language, setLanguage, setText, t, translate } from "./i18n.js";
import { nextTheme, theme } from "./theme.js";

const LOGO = ["one", "two"];
const OFF_COOKIE = "duologue_off"; // app id; set by the server's redirect from the page of a disabled app

/**
 * Fill the page's `<header>`.
 * @param {HTMLElement} header
 * @param {object} options current: app id of this page. help: name of its help in `/static/faq/`. buttons: the page's
 *   own, before the others. mayLeave(): Promise<boolean>, asked before a link is followed
 * @returns {{show(apps: object[]): void}} draws the links to the apps of `/api/apps`
 */
export function fillHeader(header, { current = "", help, buttons = [], mayLeave = async () => true } = {}) {
  const nav = make("nav", { class: "apps", id: "apps", "data-label": "apps" });
  header.className = "top";
  header.append(brand(), nav, ...buttons, helpButton(help), themeButton(), languageButton());
  translate(header);
  header.addEventListener("click", async (event) => {
    const link = event.target.closest("a");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    if (await mayLeave()) location.assign(link.href);
  });
  return { show: (apps) => showApps(nav, apps, current) };
}

/** Apps that have a name on this page. @throws {Error|TypeError} */
export async function fetchApps() {
  const { apps } = await fetchJson("/api/apps");
  return apps.filter(({ app_id: id }) => hasText(`app_${id}`));
}

/** App id of the disabled app from whose page the server redirected here; null otherwise. Reading it clears it. */
export function takeDisabledApp() {
  const [, id = null] = document.cookie.match(new RegExp(`(?:^|; )${OFF_COOKIE}=([a-z_]+)`)) ?? [];
  if (id) document.cookie = `${OFF_COOKIE}=; Max-Age=0; Path=/; SameSite=Lax`;
  return id;
}

function brand() {
  const svg = icon("");
  svg.setAttribute("class", "logo");
  svg.setAttribute("viewBox", "0 0 32 32");
  svg.replaceChildren(...LOGO.map((name, i) => {
    const circle = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    for (const [key, value] of Object.entries({ class: name, cx: 12 + 8 * i, cy: 16, r: 9 })) circle.setAttribute(key, value);
    return circle;
  }));
  return make("a", { class: "brand", href: "/", "data-label": "home" }, svg, make("span", { "data-text": "title" }));
}

function themeButton() {
  const button = make("button", { class: "quiet icon", id: "theme", type: "button" }, icon("theme"));
  label(button, `theme_${theme()}`);
  button.onclick = () => label(button, `theme_${nextTheme()}`);
  return button;
}

function languageButton() {
  const button = make("button", { class: "quiet", id: "language", type: "button" });
  button.dataset.text = "language";
  button.dataset.label = "language_label";
  button.onclick = () => setLanguage(language() === "zh" ? "en" : "zh", true);
  return button;
}

function showApps(nav, apps, current) {
  const links = apps.map(({ app_id: id, route }) => {
    const link = make("a", { href: route });
    if (id === current) link.setAttribute("aria-current", "page");
    setText(link, `app_${id}`);
    return link;
  });
  nav.replaceChildren(...(links.length > 1 ? links : []));
  nav.setAttribute("aria-label", t("apps"));
  nav.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
}
