/** Pictures from files. */

import { make } from "./dom.js";

/**
 * A picture as JPEG, made smaller if it is larger.
 * @param {Blob} file any picture the browser can decode @param {number} maxSide pixels @param {number} quality 0 to 1
 * @returns {Promise<Blob>} @throws {Error} if it cannot be decoded
 */
export async function jpegOf(file, maxSide, quality) {
  const picture = await createImageBitmap(file);
  const scale = Math.min(1, maxSide / Math.max(picture.width, picture.height));
  const canvas = make("canvas", { width: Math.round(picture.width * scale), height: Math.round(picture.height * scale) });
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve, reject) => {
    canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error(file.name))), "image/jpeg", quality);
  });
}
