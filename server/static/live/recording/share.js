/** Sharing a recorded conversation: its link, a comment, and the recording made in the browser. */

import { byId } from "../../shared/dom.js";
import { fetchJson, sendJson } from "../../shared/api.js";
import { setPlain, setText } from "../../shared/i18n.js";

/** Address of a session's page. */
export const shareUrl = (id) => new URL(`/s/${encodeURIComponent(id)}`, location.href).href;

/** Open the dialog. @param {string} id of the server's recording @param {Blob|null} recording made in the browser */
export function openShare(id, recording) {
  byId("share-link").value = shareUrl(id);
  byId("share-upload-row").hidden = !recording;
  setPlain(byId("share-state"), "");
  byId("share-send").onclick = () => send(id, byId("share-upload").checked ? recording : null);
  byId("share-dialog").showModal();
  byId("share-link").select();
}

async function send(id, recording) {
  const button = byId("share-send");
  button.disabled = true;
  setText(byId("share-state"), "share_sending");
  try {
    const path = `/api/sessions/${encodeURIComponent(id)}`;
    const comment = byId("share-comment").value.trim();
    if (comment) await sendJson(`${path}/comment`, { comment });
    if (recording) await upload(path, recording);
    await navigator.clipboard?.writeText(byId("share-link").value);
    setText(byId("share-state"), "share_done");
  } catch (error) {
    setPlain(byId("share-state"), error.message);
  } finally {
    button.disabled = false;
  }
}

function upload(path, recording) {
  const body = new FormData();
  const suffix = recording.type.endsWith("mp4") ? "mp4" : "webm";
  body.append("file", recording, `recording.${suffix}`);
  return fetchJson(`${path}/upload-recording`, { method: "POST", body });
}
