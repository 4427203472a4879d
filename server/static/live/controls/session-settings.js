/** The settings of a session (docs/session-config.md), as data for `Fields`. */

const percent = { min: 0, max: 1, step: 0.01 };

export const SESSION_SETTINGS = [
  { key: "length_penalty", kind: "number", min: 0.1, max: 5, step: 0.05, usual: 1.1 },
  { key: "listen_prob_scale", kind: "number", min: 0.0001, max: 100, usual: 1 },
  { key: "listen_top_k", kind: "number", min: 1, step: 1, usual: null },
  { key: "force_listen_count", kind: "number", min: 0, max: 1000, step: 1, usual: 3 },
  { key: "max_new_speak_tokens_per_chunk", kind: "number", min: 1, max: 64, step: 1, usual: 20 },
  { key: "max_chars_per_chunk", kind: "number", min: 1, max: 1000, step: 1, usual: 28 },
  { key: "decode_mode", kind: "choice", options: ["sampling", "greedy"], usual: "sampling" },
  { key: "temperature", kind: "number", min: 0, max: 2, step: 0.05, usual: 0.7 },
  { key: "top_k", kind: "number", min: 0, step: 1, usual: 20 },
  { key: "top_p", kind: "number", ...percent, usual: 0.8 },
  { key: "text_repetition_penalty", kind: "number", min: 0.1, max: 10, step: 0.05, usual: 1.05 },
  { key: "text_repetition_window_size", kind: "number", min: 0, max: 4096, step: 1, usual: 512 },
  { key: "generate_audio", kind: "switch", usual: true },
  { key: "tts_temperature", kind: "number", min: 0.000001, max: 2, usual: 0.8 },
  { key: "tts_repetition_penalty", kind: "number", min: 0.1, max: 10, step: 0.05, usual: 1.05 },
  { key: "early_sound", kind: "switch", usual: true },
  { key: "drain_s", kind: "number", min: 0, max: 10, step: 0.5, usual: 4 },
  { key: "euler_steps", kind: "number", min: 1, max: 50, step: 1, usual: null },
  { key: "max_slice_nums", kind: "number", min: 1, max: 9, step: 1, usual: 1 },
  { key: "window.mode", kind: "choice", options: ["off", "basic", "context"], usual: "basic" },
  { key: "window.high_tokens", kind: "number", min: 1, max: 1000000, step: 1, usual: 4000 },
  { key: "window.low_tokens", kind: "number", min: 0, max: 1000000, step: 1, usual: 3500 },
  { key: "window.previous_max_tokens", kind: "number", min: 1, max: 100000, step: 1, usual: 500 },
  { key: "window.max_units", kind: "number", min: 1, max: 10000, step: 1, usual: 24 },
  { key: "window.marker", kind: "text", max: 200, usual: "previous:" },
  { key: "ls_mode", kind: "choice", options: ["explicit", "implicit"], usual: "explicit" },
  { key: "compat", kind: "choice", options: ["fixed", "reference"], usual: "fixed" },
  { key: "seed", kind: "number", min: 0, step: 1, usual: null },
];
