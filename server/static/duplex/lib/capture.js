/** The microphone, with the browser's echo cancellation. Its worklet splits the sound into units of one second. */

export class Capture {
  #context;
  #node;
  #source = null;
  #stream = null;
  #muted = false;
  #closed = false;

  /** on: handlers {soon, unit, level, lost}; `lost` is called when the device is disconnected. */
  constructor(context, on) {
    this.#context = context;
    this.on = on;
    this.#node = new AudioWorkletNode(context, "duologue-capture", {
      numberOfInputs: 1, numberOfOutputs: 1, channelCount: 1, channelCountMode: "explicit",
    });
    // Browsers run only nodes that are connected to the destination. This output is silent.
    this.#node.connect(context.destination);
    this.#node.port.onmessage = ({ data }) => on[data.type]?.(data);
  }

  static load(context) {
    return context.audioWorklet.addModule(new URL("./capture-worklet.js", import.meta.url));
  }

  /** Request a microphone. @throws {DOMException} */
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

  /** Stop a stream that `open` returned. */
  static stop(stream) {
    for (const track of stream.getTracks()) track.stop();
  }

  /** Capture a stream that `open` returned, in place of the current one. After `close`, stop it instead. */
  use(stream) {
    if (this.#closed) {
      Capture.stop(stream);
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

  /** Mute or unmute. While muted, silence is sent and the conversation continues. */
  mute(muted) {
    this.#muted = muted;
    for (const track of this.#stream?.getAudioTracks() ?? []) track.enabled = !muted;
  }

  /** Start or stop producing units. An incomplete unit is dropped. */
  run(on) {
    this.#node.port.postMessage({ type: "run", on });
  }

  #release() {
    this.#source?.disconnect();
    if (this.#stream) Capture.stop(this.#stream);
    this.#source = this.#stream = null;
  }

  close() {
    this.#closed = true;
    this.#release();
    this.#node.disconnect();
    this.#node.port.close();
  }
}
