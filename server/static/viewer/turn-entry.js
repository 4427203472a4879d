/** One turn of a chat or half-duplex session: what the user gave, and the answer. */

import { make } from "../shared/dom.js";
import { clock, t } from "../shared/i18n.js";
import { playerOf, seekButton } from "./entry-parts.js";

/** @param {object} turn of recording.json @param {{at: number, asset: Function, onPlay: Function}} page at: in the replay, seconds */
export function turnEntry(turn, { at, asset, onPlay }) {
  const { input, output, timing } = turn;
  const given = make("div", { class: "body user" }, make("h3", {}, t("you")));
  if (input.text) given.append(make("p", { class: "words" }, input.text));
  for (const path of input.images ?? []) given.append(make("img", { src: asset(path), alt: t("your_picture"), loading: "lazy" }));
  for (const path of input.videos ?? []) given.append(playerOf("video", asset(path), "your_video"));
  if (input.audio) given.append(playerOf("audio", asset(input.audio), "your_sound"));
  const answer = make("div", { class: "body model" }, make("h3", {}, t("model")));
  if (output.text) answer.append(make("p", { class: "words" }, output.text));
  if (output.error) answer.append(make("p", { class: "failed" }, output.error));
  if (turn.incomplete) answer.append(make("p", { class: "quietly" }, t("incomplete")));
  if (output.audio) answer.append(playerOf("audio", asset(output.audio), "model_sound"));
  const shown = [t("took", { ms: timing.elapsed_ms.toFixed(0) })];
  if (timing.speech_input_ms) shown.push(t("spoke_for", { time: clock(timing.speech_input_ms / 1000) }));
  if (timing.tokens) shown.push(t("tokens", { n: timing.tokens }));
  answer.append(make("p", { class: "timing" }, shown.join(" · ")));
  return make("li", { class: "exchange" }, seekButton(at, onPlay), given, answer);
}
