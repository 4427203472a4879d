/**
 * The source of pictures: a camera, the screen or a video file. Shows it in a video element and has its newest picture
 * as JPEG. Does not send pictures.
 */

const QUALITY = 0.7;
const MAX_SIDE = { plain: 640, detailed: 1344 }; // pixels of the longer side: for one image slice, or for several
const STALE_MS = 2500; // older pictures are not sent

export class Camera {
  #video;
  #canvas = document.createElement("canvas");
  #stream = null;
  #newest = null;
  #busy = null;
  #opening = 0; // counts calls of `open` and `close`: only the result of the last one is used
  #fileSound = null;
  #mirror = true;
  kind = null; // "camera", "screen", "file", or null while closed
  facing = "user";
  detailed = false;
  lost = () => {}; // called when the source ends by itself

  /** @param {HTMLVideoElement} video */
  constructor(video) {
    this.#video = video;
    video.addEventListener("ended", () => this.kind === "file" && this.lost("file"));
  }

  get isOn() {
    return this.kind !== null;
  }

  get video() {
    return this.#video;
  }

  /** Whether the preview of a front camera is mirrored. Pictures are never mirrored. */
  set mirror(on) {
    this.#mirror = on;
    this.#showMirror();
  }

  #showMirror() {
    this.#video.classList.toggle("mirrored", this.#mirror && this.kind === "camera" && this.facing === "user");
  }

  /** Request a camera and show it, unless `close` or another `open` is called before. @throws {DOMException} */
  async open(deviceId = "") {
    this.close();
    const opening = this.#opening;
    const stream = await navigator.mediaDevices.getUserMedia({
      video: {
        ...(deviceId ? { deviceId: { ideal: deviceId } } : { facingMode: { ideal: this.facing } }),
        width: { ideal: 1280 },
        height: { ideal: 720 },
        frameRate: { ideal: 24, max: 30 },
      },
    });
    if (!this.#isCurrent(opening, stream)) return;
    const facing = stream.getVideoTracks()[0].getSettings().facingMode ?? (deviceId ? "user" : this.facing);
    this.facing = facing === "environment" ? "environment" : "user";
    await this.#show("camera", stream);
  }

  /** Request a screen or window. @returns {Promise<MediaStream|null>} with its sound, if the user shared it */
  async openScreen() {
    const stream = await navigator.mediaDevices.getDisplayMedia({ video: { frameRate: { ideal: 5 } }, audio: true });
    this.close();
    if (!this.#isCurrent(this.#opening, stream)) return null;
    await this.#show("screen", stream);
    return stream;
  }

  /** Show a file from its beginning, paused. @param {File} file @throws {DOMException} if it cannot be played */
  async openFile(file) {
    this.close();
    const opening = this.#opening;
    this.#video.src = URL.createObjectURL(file);
    await new Promise((resolve, reject) => {
      this.#video.onloadeddata = resolve;
      this.#video.onerror = () => reject(new DOMException(file.name, "NotSupportedError"));
    });
    if (opening !== this.#opening) return;
    this.kind = "file";
    this.#showMirror();
  }

  /** Play or hold a file. */
  play(on) {
    if (this.kind !== "file") return;
    if (on) this.#video.play().catch(() => {}); // closing the file rejects it
    else this.#video.pause();
  }

  /** The sound of files as a node. From then on it is heard only through this node. @param {AudioContext} context */
  fileSound(context) {
    this.#fileSound ??= new MediaElementAudioSourceNode(context, { mediaElement: this.#video });
    this.#video.muted = false;
    return this.#fileSound;
  }

  #isCurrent(opening, stream) {
    if (opening === this.#opening) return true;
    for (const track of stream.getTracks()) track.stop();
    return false;
  }

  async #show(kind, stream) {
    this.kind = kind;
    this.#stream = stream;
    stream.getVideoTracks()[0].addEventListener("ended", () => {
      if (this.#stream !== stream) return;
      this.close();
      this.lost(kind);
    });
    this.#showMirror();
    this.#video.srcObject = stream;
    await this.#video.play().catch(() => {}); // closing the stream rejects it
  }

  /** Switch between front and back camera. */
  flip() {
    this.facing = this.facing === "user" ? "environment" : "user";
    return this.open();
  }

  /** What the camera can do besides: {torch: boolean, zoom: {min, max, step}|null}. */
  get abilities() {
    const [track] = (this.kind === "camera" && this.#stream?.getVideoTracks()) || [];
    const { torch = false, zoom = null } = track?.getCapabilities?.() ?? {};
    return { torch: Boolean(torch), zoom: zoom?.max > zoom?.min ? zoom : null };
  }

  /** @param {{torch?: boolean, zoom?: number}} settings of `abilities` @throws {DOMException} */
  async set(settings) {
    await this.#stream?.getVideoTracks()[0].applyConstraints({ advanced: [settings] });
  }

  /** Take a picture now. `picture` returns it once it is encoded. */
  snap() {
    const { videoWidth: width, videoHeight: height } = this.#video;
    if (!this.isOn || !width || this.#busy) return;
    const scale = Math.min(1, MAX_SIDE[this.detailed ? "detailed" : "plain"] / Math.max(width, height));
    const canvas = this.#canvas;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.getContext("2d", { alpha: false }).drawImage(this.#video, 0, 0, canvas.width, canvas.height);
    const taken = performance.now();
    this.#busy = new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", QUALITY))
      .then((blob) => blob?.arrayBuffer())
      .then((bytes) => {
        if (bytes && this.isOn) this.#newest = { bytes: new Uint8Array(bytes), taken };
      })
      .finally(() => (this.#busy = null));
  }

  /**
   * The newest picture. Waits up to `timeoutMs` for one that is being encoded.
   * @returns {Promise<Uint8Array|null>}
   */
  async picture(timeoutMs) {
    if (!this.isOn) return null;
    if (this.#busy) await Promise.race([this.#busy, new Promise((resolve) => setTimeout(resolve, timeoutMs))]);
    const newest = this.#newest;
    return newest && performance.now() - newest.taken < STALE_MS ? newest.bytes : null;
  }

  close() {
    this.#opening += 1;
    for (const track of this.#stream?.getTracks() ?? []) track.stop();
    this.#stream = this.#newest = this.kind = null;
    this.#video.srcObject = null;
    if (this.#video.src) {
      URL.revokeObjectURL(this.#video.src);
      this.#video.removeAttribute("src");
      this.#video.load();
    }
  }
}
