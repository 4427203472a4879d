/**
 * The worker of the voice detector: runs the network on the windows of `windows-worklet.js`.
 *
 * Receives {type: "start", weights, port} once; {type: "tune", on, active, confirmMs, isCancelled}. Sends {type: "speech", ms}
 * when speech is confirmed while `active`.
 */

import { readWeights } from "./speech-network.js";
import { UserSpeech } from "./user-speech.js";

let speech = null;
let state = { on: false, active: false };

function take({ mic, played }) {
  if (state.on && speech.add(mic, played, state.active)) postMessage({ type: "speech", ms: speech.onset.ms });
}

function tune(next) {
  if (next.on && !state.on) speech.reset();
  if (!next.active || !state.active) speech.onset.reset();
  speech.onset.confirmMs = next.confirmMs;
  speech.isCancelled = next.isCancelled;
  state = next;
}

onmessage = ({ data }) => {
  if (data.type === "tune") tune(data);
  else {
    speech = new UserSpeech(readWeights(data.weights));
    data.port.onmessage = ({ data: windows }) => take(windows);
  }
};
