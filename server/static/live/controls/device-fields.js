/** The pickers of microphone, camera and speaker. */

import { byId, fillSelect } from "../../shared/dom.js";
import { onLanguage, t } from "../../shared/i18n.js";

const DEVICES = [
  ["set-mic", "mic", "audioinput"],
  ["set-camera", "camera", "videoinput"],
  ["set-speaker", "speaker", "audiooutput"],
];

/** @param {Settings} settings @param {object} on mic(id), camera(id), speaker(id) @returns {() => Promise<void>} refresh */
export function deviceFields(settings, on) {
  for (const [id, name] of DEVICES) {
    byId(id).onchange = ({ target }) => {
      settings.set({ [name]: target.value });
      on[name](target.value);
    };
  }
  byId("speaker-row").hidden = !("setSinkId" in AudioContext.prototype);
  const refresh = async () => {
    const devices = (await navigator.mediaDevices?.enumerateDevices().catch(() => [])) ?? [];
    for (const [id, name, kind] of DEVICES) {
      const found = devices.filter((one) => one.kind === kind && one.deviceId && one.deviceId !== "default");
      const options = found.map((one, i) => [one.deviceId, one.label || t("device_unnamed", { number: i + 1 })]);
      fillSelect(byId(id), [["", t("device_default")], ...options], settings.values[name]);
    }
  };
  navigator.mediaDevices?.addEventListener?.("devicechange", refresh);
  onLanguage(refresh);
  return refresh;
}
