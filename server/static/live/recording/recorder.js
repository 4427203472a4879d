/** A recording made in the browser: both voices, and the picture with subtitles if there is one. */

import { lastWords } from "../view/subtitles.js";

const FRAME_MS = 1000 / 12;
const WIDTH = 960;
const TYPES = {
  video: ["video/webm;codecs=vp9,opus", "video/webm", "video/mp4"],
  audio: ["audio/webm;codecs=opus", "audio/webm", "audio/mp4"],
};

export class Recorder {
  #recorder;
  #parts = [];
  #drawing = 0;
  #mixed;
  #inputs;

  /**
   * @param {AudioContext} context @param {AudioNode[]} inputs what is heard in the recording
   * @param {{video: HTMLVideoElement|null, text: () => string}} picture video: null for sound only
   */
  constructor(context, inputs, { video, text }) {
    this.#mixed = new MediaStreamAudioDestinationNode(context);
    this.#inputs = inputs;
    for (const input of inputs) input.connect(this.#mixed);
    const tracks = this.#mixed.stream.getAudioTracks();
    if (video) tracks.push(...this.#draw(video, text).getVideoTracks());
    const mimeType = TYPES[video ? "video" : "audio"].find((type) => MediaRecorder.isTypeSupported(type));
    this.#recorder = new MediaRecorder(new MediaStream(tracks), { mimeType });
    this.#recorder.ondataavailable = ({ data }) => this.#parts.push(data);
    this.#recorder.start(1000);
  }

  /** Draw on a canvas, so that the source of the picture may change during the recording. */
  #draw(video, text) {
    const canvas = document.createElement("canvas");
    canvas.width = WIDTH;
    canvas.height = Math.round((WIDTH * 9) / 16);
    const pen = canvas.getContext("2d", { alpha: false });
    this.#drawing = setInterval(() => drawFrame(pen, video, text()), FRAME_MS);
    return canvas.captureStream();
  }

  /** @returns {Promise<Blob>} */
  async stop() {
    const over = new Promise((resolve) => (this.#recorder.onstop = resolve));
    this.#recorder.stop();
    await over;
    clearInterval(this.#drawing);
    for (const input of this.#inputs) detach(input, this.#mixed);
    for (const track of this.#recorder.stream.getTracks()) track.stop();
    return new Blob(this.#parts, { type: this.#recorder.mimeType.split(";")[0] });
  }
}

/** Disconnect two nodes, which the end of the conversation may have done already. */
function detach(input, output) {
  try {
    input.disconnect(output);
  } catch (error) {
    if (error.name !== "InvalidAccessError") throw error;
  }
}

function drawFrame(pen, video, text) {
  const { width, height } = pen.canvas;
  pen.fillStyle = "#20272a";
  pen.fillRect(0, 0, width, height);
  const scale = Math.min(width / (video.videoWidth || 1), height / (video.videoHeight || 1));
  const [w, h] = [video.videoWidth * scale, video.videoHeight * scale];
  if (w) pen.drawImage(video, (width - w) / 2, (height - h) / 2, w, h);
  if (!text) return;
  pen.font = "22px system-ui, sans-serif";
  pen.textAlign = "center";
  const lines = wrapped(pen, lastWords(text), width - 80);
  lines.forEach((line, i) => {
    const y = height - 26 - 30 * (lines.length - 1 - i);
    const half = pen.measureText(line).width / 2 + 10;
    pen.fillStyle = "rgb(12 15 16 / .75)";
    pen.fillRect(width / 2 - half, y - 23, 2 * half, 30);
    pen.fillStyle = "#fff";
    pen.fillText(line, width / 2, y);
  });
}

/** The text in lines that fit. Languages without spaces break at any character. */
function wrapped(pen, text, width) {
  const lines = [""];
  for (const word of text.match(/[\u3000-\u9fff]|[^\s\u3000-\u9fff]+\s*/g) ?? []) {
    const line = lines.at(-1) + word;
    if (pen.measureText(line).width <= width || !lines.at(-1)) lines[lines.length - 1] = line;
    else lines.push(word);
  }
  return lines;
}
