/** The replay of a whole session: video, or sound where there is none, with its waveform. */

import { byId } from "../../shared/dom.js";
import { readPeaks } from "./wav-peaks.js";
import { Waveform } from "./waveform.js";

export class Replay {
  #media = byId("media");
  #onTime;
  #wave;

  /** @param {(seconds: number) => void} onTime called while the position changes */
  constructor(onTime) {
    this.#onTime = onTime;
    this.#wave = new Waveform((seconds) => (this.#media.currentTime = seconds), () => this.#toggle());
    for (const kind of ["timeupdate", "seeked"]) this.#media.addEventListener(kind, () => this.#show());
  }

  /** @param {string} sound address of the WAV file @param {string|undefined} video address of the video */
  async open(sound, video) {
    byId("replay").hidden = false;
    this.#load(video ?? sound, !video);
    this.#media.onerror = () => this.#media.src.endsWith(sound) || this.#load(sound, true); // a codec is missing
    const response = await fetch(sound);
    if (response.ok) this.#wave.peaks = await readPeaks(response.body, (peaks) => (this.#wave.peaks = peaks));
  }

  /** Play from a position. */
  play(seconds) {
    this.#media.currentTime = seconds;
    this.#media.play().catch(() => {}); // refused by the browser until the user presses a button of the player
  }

  #load(address, isSound) {
    this.#media.classList.toggle("sound", isSound);
    this.#media.src = address;
  }

  #toggle() {
    if (this.#media.paused) this.play(this.#media.currentTime);
    else this.#media.pause();
  }

  #show() {
    this.#wave.move(this.#media.currentTime);
    this.#onTime(this.#media.currentTime);
  }
}
