/** Dialogs: a question with two answers, and sheets that close by a click outside of them. */

import { make } from "./dom.js";
import { t } from "./i18n.js";

/** Close a dialog also by a click on its backdrop and by its button with `data-close`. */
export function closable(dialog) {
  dialog.addEventListener("click", ({ target }) => {
    if (target === dialog || target.closest("[data-close]")) dialog.close();
  });
}

/**
 * Ask a question. Escape and a click outside mean no.
 * @param {{title: string, text?: string, yes: string, no?: string}} keys of the texts
 * @returns {Promise<boolean>}
 */
export function ask({ title, text, yes, no = "cancel" }) {
  const answer = (value, key, strong) =>
    make("button", { value, class: strong ? "button strong" : "button", autofocus: !strong }, t(key));
  const dialog = make("dialog", { class: "box", "aria-labelledby": "ask-title" },
    make("h2", { id: "ask-title" }, t(title)),
    ...(text ? [make("p", {}, t(text))] : []),
    make("form", { method: "dialog", class: "row" }, answer("no", no, false), answer("yes", yes, true)));
  document.body.append(dialog);
  dialog.addEventListener("click", ({ target }) => target === dialog && dialog.close("no"));
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    };
  });
}
