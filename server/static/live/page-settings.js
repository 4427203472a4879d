/** The stored settings of the live page and their defaults. */

import { Settings } from "../shared/settings.js";

const DEFAULTS = {
  preset: null, // id; null: not chosen yet; "": none
  prompt: "",
  voice: "default", // or "preset", "own", "id:" and the id of a registered voice
  mic: "",
  camera: "",
  speaker: "",
  cameraOn: true,
  delayMs: null, // null: the server's default
  detailed: false,
  mirror: true,
  volume: 1,
  length: "usual", // of `LENGTHS`
  session: {}, // session settings by dotted key
  extra: "", // JSON object with further session settings
  trims: { mic: 0, file: 0 }, // dB
  monitor: 0.5,
  micWithFile: true,
  singleKeys: true,
  ownWords: false, // recognized by the browser, and shown
  bargeIn: true, // speech stops the reply
  bargeInMs: 200,
};

export const pageSettings = () => new Settings("duologue_settings", DEFAULTS);
