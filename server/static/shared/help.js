/** The help of a page: a dialog with its questions and answers, which are a Markdown file in the page's language. */

import { closable } from "./dialogs.js";
import { icon, make } from "./dom.js";
import { label, language, onLanguage, t, translate } from "./i18n.js";
import { questionsOf } from "./markdown.js";

/**
 * The button that opens a page's help.
 * @param {string} page name of the files in `/static/faq/` @param {HTMLDialogElement} dialog with an element `.faq`
 */
export function helpButton(page, dialog = document.querySelector("dialog#help") ?? makeDialog()) {
  const place = dialog.querySelector(".faq");
  let shown = ""; // language of what is shown
  const fill = async () => {
    const wanted = language();
    if (shown === wanted || !dialog.open) return;
    const text = await fetch(`/static/faq/${wanted}/${page}.md`).then((answer) => (answer.ok ? answer.text() : null), () => null);
    if (wanted !== language()) return; // switched meanwhile
    if (text !== null) shown = wanted;
    place.replaceChildren(...(text === null ? [make("p", {}, t("help_missing"))] : questionsOf(text)));
  };
  closable(dialog);
  onLanguage(fill);
  new MutationObserver(fill).observe(dialog, { attributeFilter: ["open"] });
  const button = make("button", { class: "quiet icon", id: "page-help", type: "button" }, icon("help"));
  label(button, "help");
  button.onclick = () => dialog.showModal();
  return button;
}

function makeDialog() {
  const dialog = make("dialog", { class: "box", id: "help", "aria-labelledby": "help-title" },
    make("h2", { id: "help-title", "data-text": "help" }),
    make("div", { class: "faq" }),
    make("form", { method: "dialog", class: "row" }, make("button", { class: "button strong", "data-text": "close" })));
  translate(dialog);
  document.body.append(dialog);
  return dialog;
}
