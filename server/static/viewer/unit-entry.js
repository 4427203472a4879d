/** One unit of a duplex session: picture, sound of the user, text and sound of the model, timings. */

import { make } from "../shared/dom.js";
import { t } from "../shared/i18n.js";
import { seekButton, soundOf } from "./entry-parts.js";

const STAGES = ["prefill_ms", "llm_ms", "tts_prep_ms", "tts_ms", "token2wav_ms"];

/** @param {object} chunk of recording.json @param {{at: number, asset: Function, onPlay: Function}} page at: in the replay, seconds */
export function unitEntry(chunk, { at, asset, onPlay }) {
  const { result, user_audio: heard, user_frame: frame, user_text: written } = chunk;
  const speaks = result.mode === "SPEAK";
  const entry = make("li", { class: speaks ? "unit speaks" : "unit" }, seekButton(at, onPlay));
  if (frame) entry.append(make("img", { src: asset(frame), alt: t("picture_at", { n: chunk.index + 1 }), loading: "lazy" }));
  const body = make("div", { class: "body" });
  if (written) body.append(make("p", { class: "written" }, `${t("you")}: ${written}`));
  if (speaks && result.text) body.append(make("p", { class: "words" }, result.text));
  else body.append(make("p", { class: "quietly" }, t(chunk.unanswered ? "unanswered" : speaks ? "speaks" : "listens")));
  const sounds = make("div", { class: "sounds" });
  if (heard) sounds.append(soundOf(asset(heard), "your_sound"));
  if (result.ai_audio) sounds.append(soundOf(asset(result.ai_audio), "model_sound"));
  body.append(sounds, timings(result));
  entry.append(body);
  return entry;
}

function timings({ timing, shift_ms: shift }) {
  const numbers = STAGES.filter((key) => timing[key]).map((key) => `${t(key)} ${timing[key].toFixed(0)}`);
  const shown = [t("took", { ms: timing.wall_clock_ms.toFixed(0) }), ...numbers];
  if (shift) shown.push(t("early_by", { ms: shift.toFixed(0) }));
  if (timing.kv_cache_length) shown.push(t("context_of", { n: timing.kv_cache_length }));
  return make("p", { class: "timing" }, shown.join(" · "));
}
