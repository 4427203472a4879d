/** Whether the user speaks: the network's probability, the background and the echo of each window, put together. */

import { Background } from "./background.js";
import { BANDS, FRAMES, bandAmplitudes } from "./bands.js";
import { Echo } from "./echo.js";
import { Onset } from "./onset.js";
import { SpeechNetwork } from "./speech-network.js";

export class UserSpeech {
  #network;
  #reference; // a second network, of which only the spectrum is used
  #background = new Background();
  #echo = new Echo();
  #mic = new Float32Array(FRAMES * BANDS);
  #played = new Float32Array(FRAMES * BANDS);
  onset = new Onset();

  /** @param {Object<string, Float32Array>} weights of `readWeights` */
  constructor(weights) {
    this.#network = new SpeechNetwork(weights);
    this.#reference = new SpeechNetwork(weights);
  }

  /** @param {boolean} is whether the browser's echo canceller is active */
  set isCancelled(is) {
    this.#echo.isCancelled = is;
  }

  /** Forget what was heard. */
  reset() {
    for (const part of [this.#network, this.#reference, this.#background, this.#echo, this.onset]) part.reset();
  }

  /**
   * @param {Float32Array} mic the next 512 samples at 16 kHz @param {Float32Array} played the sound of that time
   * @param {boolean} isWanted without it, speech is not confirmed
   * @returns {boolean} whether speech is confirmed; once until `onset.reset`
   */
  add(mic, played, isWanted) {
    const probability = this.#network.probability(mic);
    bandAmplitudes(this.#network.spectrum, this.#mic);
    this.#background.add(this.#mic);
    bandAmplitudes(this.#reference.transform(played), this.#played);
    this.#echo.add(this.#mic, this.#played, isWanted && this.onset.isOpen);
    if (!isWanted) return false;
    const { loud, isStrong } = this.#background;
    if (!this.#echo.isPresent) return this.onset.add(probability, loud, !isStrong);
    let others = 0;
    for (let frame = 0; frame < FRAMES; frame++) {
      if (loud[frame] && !this.#echo.isOther(frame, this.#mic)) loud[frame] = 0;
      others += loud[frame];
    }
    const isEcho = 2 * others < FRAMES;
    return this.onset.add(isEcho ? 0 : probability, loud, false, isEcho);
  }
}
