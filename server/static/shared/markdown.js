/** A small part of Markdown as elements: headings, paragraphs, lists, and code in the line. Text is never HTML. */

import { make } from "./dom.js";

/** A line's text, in which `backquotes` mark code. @returns {(Node|string)[]} */
const inline = (text) => text.split("`").map((part, i) => (i % 2 ? make("code", {}, part) : part));

/** A block of lines without empty lines between them. */
function block(lines) {
  if (lines[0].startsWith("- ")) return make("ul", {}, ...lines.map((line) => make("li", {}, ...inline(line.slice(2)))));
  return make("p", {}, ...inline(lines.join(" ")));
}

/**
 * Questions and answers: each `## heading` begins a part that opens and closes. What stands before the first is shown
 * openly, without the title (`# heading`).
 * @param {string} text @returns {HTMLElement[]}
 */
export function questionsOf(text) {
  const result = [];
  let place = null; // of the present question
  for (const chunk of text.replaceAll("\r", "").split(/\n{2,}/)) {
    const lines = chunk.split("\n").filter(Boolean);
    if (!lines.length || lines[0].startsWith("# ")) continue;
    if (lines[0].startsWith("## ")) {
      place = make("details", {}, make("summary", {}, ...inline(lines.shift().slice(3))));
      result.push(place);
    }
    if (!lines.length) continue;
    if (place) place.append(block(lines));
    else result.push(block(lines));
  }
  return result;
}
