/** The part of a turn's text that was heard, estimated from the sound that was played. */

/**
 * @param {string} text of the turn
 * @param {{sound_ms: number, characters: number}[]} marks sound and text received before each piece of text
 * @param {number} soundMs received in total @param {number} heardMs played
 * @returns {string} whole words, at most up to the sound that was played
 */
export function heardText(text, marks, soundMs, heardMs) {
  if (heardMs >= soundMs) return text;
  const last = marks.findLastIndex((mark) => mark.sound_ms <= heardMs);
  if (last < 0) return "";
  const from = marks[last];
  const to = marks.slice(last + 1).find((mark) => mark.sound_ms > from.sound_ms) ?? { sound_ms: soundMs, characters: text.length };
  const share = (heardMs - from.sound_ms) / Math.max(1, to.sound_ms - from.sound_ms);
  const end = Math.floor(from.characters + share * (to.characters - from.characters));
  const isWord = (at) => /[\p{L}\p{N}]/u.test(text[at] ?? "") && !/[\u3040-\u9fff]/.test(text[at]);
  let cut = end;
  while (cut > 0 && isWord(cut) && isWord(cut - 1)) cut -= 1;
  return text.slice(0, cut);
}
