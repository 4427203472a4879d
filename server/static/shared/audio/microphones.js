/** The choice of a microphone. */

import { fillSelect } from "../dom.js";
import { onLanguage, t } from "../i18n.js";

/**
 * Fill a select with the microphones and store the choice.
 * @param {HTMLSelectElement} select @param {Settings} settings with mic, a device's id, empty for the default
 * @returns {() => Promise<void>} refresh: browsers give names and ids only after the permission
 */
export function microphoneField(select, settings) {
  const refresh = async () => {
    const devices = (await navigator.mediaDevices?.enumerateDevices().catch(() => [])) ?? [];
    const found = devices.filter(({ kind, deviceId }) => kind === "audioinput" && deviceId && deviceId !== "default");
    const options = found.map(({ deviceId, label }, i) => [deviceId, label || t("device_unnamed", { number: i + 1 })]);
    fillSelect(select, [["", t("device_default")], ...options], settings.values.mic);
  };
  select.onchange = () => settings.set({ mic: select.value });
  navigator.mediaDevices?.addEventListener?.("devicechange", refresh);
  onLanguage(refresh);
  return refresh;
}
