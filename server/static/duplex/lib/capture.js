/**
 * The microphone: opened with the browser's echo canceller, cut into seconds by its worklet.
 *
 * Knows devices and the worklet. Does not know what becomes of a second of sound.
 */

export class Capture {
  #context;
  #node;
  #source = null;
  #stream = null;
  #muted = false;
  #closed = false;

  /** on: what is called for "soon", "unit" and "level", by name; "lost" when the device goes away. */
  constructor(context, on) {
    this.#context = context;
    this.on = on;
    this.#node = new AudioWorkletNode(context, "duologue-capture", {
      numberOfInputs: 1, numberOfOutputs: 1, channelCount: 1, channelCountMode: "explicit",
    });
    // Browsers run only what leads to the speaker; this output is silent.
    this.#node.connect(context.destination);
    this.#node.port.onmessage = ({ data }) => on[data.type]?.(data);
  }

  static load(context) {
    return context.audioWorklet.addModule(new URL("./capture-worklet.js", import.meta.url));
  }

  /** Ask for a microphone. Raises: the browser's DOMException. */
  static open(deviceId = "") {
    return navigator.mediaDevices.getUserMedia({
      audio: {
        ...(deviceId && { deviceId: { ideal: deviceId } }),
        echoCancellation: true,
        noiseSuppression: true,
        autoGainControl: true,
        channelCount: { ideal: 1 },
      },
    });
  }

  /** Close a stream of `open` that is not used. */
  static letGo(stream) {
    for (const track of stream.getTracks()) track.stop();
  }

  /** Listen to a stream of `open`; an earlier one is let go, and this one too after `close`. */
  use(stream) {
    if (this.#closed) {
      Capture.letGo(stream);
      return;
    }
    this.#release();
    this.#stream = stream;
    this.#source = this.#context.createMediaStreamSource(stream);
    this.#source.connect(this.#node);
    const [track] = stream.getAudioTracks();
    track.addEventListener("ended", () => this.on.lost?.());
    this.mute(this.#muted);
  }

  /** Silence is sent while muted: the conversation goes on. */
  mute(muted) {
    this.#muted = muted;
    for (const track of this.#stream?.getAudioTracks() ?? []) track.enabled = !muted;
  }

  /** Cut seconds from now on, or no longer; what was begun of one is dropped. */
  run(on) {
    this.#node.port.postMessage({ type: "run", on });
  }

  #release() {
    this.#source?.disconnect();
    if (this.#stream) Capture.letGo(this.#stream);
    this.#source = this.#stream = null;
  }

  close() {
    this.#closed = true;
    this.#release();
    this.#node.disconnect();
    this.#node.port.close();
  }
}
