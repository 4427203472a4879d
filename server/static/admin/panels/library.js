/** Reference voices and presets. */

import { fetchJson, sendJson } from "../../shared/api.js";
import { toBase64 } from "../../shared/audio/wire.js";
import { ask } from "../../shared/dialogs.js";
import { byId, make } from "../../shared/dom.js";
import { hasText, t } from "../../shared/i18n.js";
import { dateText } from "../figures.js";
import { nameButton, rowButton, Rows, twoLines } from "../rows.js";

const PATH = "/api/assets/ref_audio";

export class Voices {
  #rows;
  #act;
  #limits = null;

  /** @param {(doing: () => Promise<any>, done: string) => Promise<void>} act */
  constructor(act) {
    this.#act = act;
    this.#rows = new Rows(byId("voices"), (voice) => this.#make(voice), update, byId("voices-empty"));
    byId("voice-form").onsubmit = (event) => {
      event.preventDefault();
      this.#upload();
    };
    byId("voice-file").onchange = ({ target }) => {
      const [file] = target.files;
      if (file && !byId("voice-name").value) byId("voice-name").value = file.name.replace(/\.[^.]*$/, "").slice(0, 80);
    };
  }

  async refresh() {
    const { ref_audios: voices } = await fetchJson(PATH);
    this.#limits ??= (await fetchJson("/api/frontend_defaults")).voices;
    this.#rows.show(voices, ({ id }) => id);
    this.#showLimits();
  }

  redraw() {
    this.#rows.redraw();
    this.#showLimits();
  }

  #showLimits() {
    if (!this.#limits) return;
    const { min_s: min, max_s: max, max_bytes: bytes, max_count: n } = this.#limits;
    byId("voice-limits").textContent = t("voice_limits", { min, max, n, size: Math.floor(bytes / 2 ** 20) });
  }

  #make({ id, name, source_type: source }) {
    const { title, details, what } = twoLines();
    const sound = make("audio", { controls: true, preload: "none", src: `${PATH}/${encodeURIComponent(id)}/audio.wav` });
    const remove = rowButton("delete", async () => {
      if (!(await ask({ title: "voice_delete_title", text: "voice_delete_text", yes: "delete", no: "keep" }))) return;
      await this.#act(() => fetchJson(`${PATH}/${encodeURIComponent(id)}`, { method: "DELETE" }), t("done_deleted", { name }));
    }, true);
    return { title, details, sound, remove, children: [what, sound, ...(source === "upload" ? [remove] : [])] };
  }

  async #upload() {
    const [file] = byId("voice-file").files;
    if (this.#limits && file.size > this.#limits.max_bytes) {
      await this.#act(() => Promise.reject(new Error(t("voice_too_large", { size: Math.floor(this.#limits.max_bytes / 2 ** 20) }))));
      return;
    }
    const name = byId("voice-name").value.trim();
    byId("voice-send").disabled = true;
    await this.#act(async () => {
      await sendJson(PATH, { name, audio_base64: toBase64(new Uint8Array(await file.arrayBuffer())) });
      byId("voice-form").reset();
    }, t("done_added", { name }));
    byId("voice-send").disabled = false;
  }
}

function update({ title, details, sound, remove }, voice) {
  title.textContent = voice.name;
  details.textContent = [
    t("voice_seconds", { s: (voice.duration_ms / 1000).toFixed(1) }),
    voice.source_type === "builtin" ? t("voice_builtin") : dateText(voice.created_at),
  ].join(" · ");
  sound.setAttribute("aria-label", t("voice_sound", { name: voice.name }));
  nameButton(remove, voice.name);
}

export class Presets {
  #report = null;

  async refresh() {
    this.#report = await fetchJson("/api/admin/presets");
    this.redraw();
  }

  redraw() {
    if (!this.#report) return;
    const { modes, folders, problems } = this.#report;
    const counted = Object.entries(modes).map(([mode, n]) => `${hasText(`app_${mode}`) ? t(`app_${mode}`) : mode}: ${n}`);
    byId("presets").textContent = [counted.join(", "), t("presets_folders", { folders: folders.join(", ") })].join(" · ");
    byId("problems").replaceChildren(...problems.map((one) => make("li", {}, one)));
  }
}
