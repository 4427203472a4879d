/**
 * The worker of the voice detector: runs the network on the windows of `windows-worklet.js`.
 *
 * Receives {type: "start", weights, port} once; {type: "tune", on, active, confirmMs}. Sends {type: "speech", ms}
 * when speech is confirmed while `active`.
 */

import { Echo } from "./echo.js";
import { Onset } from "./onset.js";
import { SpeechNetwork, readWeights } from "./speech-network.js";

const onset = new Onset();
const echo = new Echo();
let network = null;
let reference = null; // a second network, of which only the spectrum is used
let state = { on: false, active: false };

function take({ mic, played }) {
  if (!state.on) return;
  const probability = network.probability(mic);
  echo.add(network.spectrum, reference.transform(played));
  if (!state.active || !onset.add(probability, () => echo.isEcho)) return;
  postMessage({ type: "speech", ms: onset.ms });
}

function tune(next) {
  if (next.on && !state.on) {
    network.reset();
    reference.reset();
    echo.reset();
  }
  if (!next.active || !state.active) onset.reset();
  onset.confirmMs = next.confirmMs;
  state = next;
}

onmessage = ({ data }) => {
  if (data.type === "tune") tune(data);
  else {
    const weights = readWeights(data.weights);
    network = new SpeechNetwork(weights);
    reference = new SpeechNetwork(weights);
    data.port.onmessage = ({ data: windows }) => take(windows);
  }
};
