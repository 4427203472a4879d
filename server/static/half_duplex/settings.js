/** The settings of a half-duplex conversation (docs/protocol.md), as data for `Fields`. */

export const SPEECH_SETTINGS = [
  { key: "vad.threshold", kind: "range", min: 0.05, max: 1, step: 0.05, usual: 0.7 },
  { key: "vad.min_silence_duration_ms", kind: "range", min: 100, max: 3000, step: 100, usual: 500 },
  { key: "vad.min_speech_duration_ms", kind: "number", min: 0, max: 10000, step: 1, usual: 128 },
  { key: "vad.speech_pad_ms", kind: "number", min: 0, max: 1000, step: 1, usual: 30 },
  { key: "vad.barge_in", kind: "switch", usual: false },
  { key: "vad.barge_in_ms", kind: "number", min: 0, max: 10000, step: 1, usual: 200 },
];
export const ANSWER_SETTINGS = [
  { key: "tts.enabled", kind: "switch", usual: true },
  { key: "session.timeout_s", kind: "number", min: 30, max: 86400, step: 1, usual: 300 },
  { key: "generation.max_new_tokens", kind: "number", min: 1, max: 4096, step: 1, usual: 256 },
  { key: "generation.length_penalty", kind: "number", min: 0.1, max: 5, step: 0.05, usual: 1.1 },
  { key: "generation.temperature", kind: "number", min: 0, max: 2, step: 0.05, usual: 0.7 },
  { key: "generation.top_p", kind: "number", min: 0, max: 1, step: 0.01, usual: 0.8 },
  { key: "generation.top_k", kind: "number", min: 0, max: 2147483647, step: 1, usual: 100 },
  { key: "generation.seed", kind: "number", min: 0, step: 1, usual: null },
];
