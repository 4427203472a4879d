/** Short signals: two rising tones, made here so that no file is loaded. */

const TONES_HZ = [659, 880];
const TONE_S = 0.16;
const LOUDNESS = 0.12;

/** Play the signal. @param {AudioContext} context */
export function chime(context, loudness = LOUDNESS) {
  if (context?.state !== "running") return;
  const gain = new GainNode(context, { gain: 0 });
  gain.connect(context.destination);
  TONES_HZ.forEach((hz, i) => {
    const tone = new OscillatorNode(context, { frequency: hz });
    const begin = context.currentTime + i * TONE_S;
    tone.connect(gain);
    gain.gain.setTargetAtTime(loudness, begin, 0.01);
    gain.gain.setTargetAtTime(0, begin + TONE_S / 2, 0.04);
    tone.start(begin);
    tone.stop(begin + TONE_S);
    if (i === TONES_HZ.length - 1) tone.onended = () => setTimeout(() => gain.disconnect(), 300);
  });
}
