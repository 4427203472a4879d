/** The camera: its preview in a video element, and its newest picture as JPEG. Does not send pictures. */

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
  facing = "user";
  detailed = false;
  lost = () => {};

  /** @param {HTMLVideoElement} video */
  constructor(video) {
    this.#video = video;
  }

  get isOn() {
    return this.#stream !== null;
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
    if (opening !== this.#opening) {
      for (const track of stream.getTracks()) track.stop();
      return;
    }
    this.#stream = stream;
    const [track] = stream.getVideoTracks();
    track.addEventListener("ended", () => {
      if (this.#stream !== stream) return;
      this.close();
      this.lost();
    });
    const facing = track.getSettings().facingMode ?? (deviceId ? "user" : this.facing);
    this.facing = facing === "environment" ? "environment" : "user";
    this.#video.classList.toggle("mirrored", this.facing === "user");
    this.#video.srcObject = stream;
    await this.#video.play().catch(() => {}); // closing the stream rejects it
  }

  /** Switch between front and back camera. */
  flip() {
    this.facing = this.facing === "user" ? "environment" : "user";
    return this.open();
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
    this.#stream = this.#newest = null;
    this.#video.srcObject = null;
  }
}
