/** Pictures, sounds and videos of a message: from files, as items of a request, and as elements. */

import { toBase64 } from "../shared/audio/wire.js";
import { make } from "../shared/dom.js";
import { t } from "../shared/i18n.js";
import { jpegOf } from "../shared/picture.js";

const MIB = 2 ** 20;
const MAX_BYTES = { image: 20 * MIB, audio: 32 * MIB, video: 94 * MIB };
const PICTURES = ["image/jpeg", "image/png", "image/webp", "image/gif", "image/bmp"]; // that the server decodes
const MAX_SIDE = 2048; // pixels, of a picture that is encoded again
const QUALITY = 0.9;

/**
 * An attachment: {kind: "image"|"audio"|"video", name, blob}.
 * @param {File} file @throws {Error} with a sentence for the user
 */
export async function attachmentOf(file) {
  const kind = file.type.split("/")[0];
  if (!(kind in MAX_BYTES)) throw new Error(t("attach_kind", { name: file.name }));
  const needsEncoding = kind === "image" && (!PICTURES.includes(file.type) || file.size > MAX_BYTES.image);
  const blob = needsEncoding ? await encoded(file) : file;
  if (blob.size > MAX_BYTES[kind]) throw new Error(t("attach_size", { name: file.name, most: MAX_BYTES[kind] / MIB }));
  return { kind, name: file.name, blob };
}

function encoded(file) {
  return jpegOf(file, MAX_SIDE, QUALITY).catch(() => {
    throw new Error(t("attach_bad", { name: file.name }));
  });
}

/** The attachment as an item of a request. @param {number} stackFrames of a video */
export async function itemOf({ kind, blob }, stackFrames) {
  const data = toBase64(new Uint8Array(await blob.arrayBuffer()));
  return { type: kind, data, ...(kind === "video" && { stack_frames: stackFrames }) };
}

/** The attachment as an element that shows or plays it. */
export function viewOf({ kind, name, blob }) {
  const src = URL.createObjectURL(blob);
  const release = () => URL.revokeObjectURL(src);
  if (kind === "image") return make("img", { src, alt: name, onload: release });
  return make(kind, { src, controls: true, preload: "metadata", "aria-label": name });
}
