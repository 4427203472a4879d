/** Apps on and off, and the expected durations of sessions. */

import { fetchJson, sendJson } from "../../shared/api.js";
import { byId, make } from "../../shared/dom.js";
import { hasText, t } from "../../shared/i18n.js";
import { Rows } from "../rows.js";

const KINDS = ["chat", "half_duplex", "audio_duplex", "omni_duplex"];
const MAX_S = 86_400;

export class Switches {
  #rows;
  #act;

  /** @param {(doing: () => Promise<any>, done: string) => Promise<void>} act */
  constructor(act) {
    this.#act = act;
    this.#rows = new Rows(byId("switches"), (app) => this.#make(app), update);
  }

  async refresh() {
    const { apps } = await fetchJson("/api/admin/apps");
    this.#rows.show(apps, ({ app_id: id }) => id);
  }

  redraw() {
    this.#rows.redraw();
  }

  #make({ app_id: id, route }) {
    const input = make("input", { type: "checkbox", role: "switch", id: `app-${id}` });
    const name = make("span");
    input.onchange = () => {
      const key = input.checked ? "done_app_on" : "done_app_off";
      this.#act(() => sendJson(`/api/admin/apps/${id}`, { enabled: input.checked }, "PUT"), t(key, { name: name.textContent }));
    };
    return { input, name, children: [make("label", { class: "check" }, input, name), make("a", { class: "button", href: route }, route)] };
  }
}

function update({ input, name }, app) {
  input.checked = app.enabled;
  name.textContent = hasText(`app_${app.app_id}`) ? t(`app_${app.app_id}`) : app.name;
}

export class Eta {
  #fields = new Map(); // name of the setting -> {input, name, note}
  #status = null;
  #act;

  /** @param {(doing: () => Promise<any>, done: string) => Promise<void>} act */
  constructor(act) {
    this.#act = act;
    for (const kind of KINDS) this.#add(`eta_${kind}_s`, { max: MAX_S, step: "any" });
    this.#add("ema_alpha", { max: 1, step: "any" });
    byId("eta").oninput = () => this.#buttons();
    byId("eta").onreset = (event) => {
      event.preventDefault();
      this.#fill();
    };
    byId("eta").onsubmit = (event) => {
      event.preventDefault();
      this.#save();
    };
  }

  /** Refresh the figures; fields that the user is changing keep their values. */
  async refresh() {
    const status = await fetchJson("/api/config/eta");
    const untouched = !this.#isChanged; // now, as the user may have typed since the request
    this.#status = status;
    if (untouched) this.#fill();
    this.redraw();
  }

  redraw() {
    for (const [key, { name, note }] of this.#fields) {
      const kind = key.slice(4, -2);
      name.textContent = key === "ema_alpha" ? t("eta_alpha") : t("eta_field", { kind: t(`kind_${kind}`) });
      const mean = this.#status?.[`ema_${kind}_s`];
      const n = this.#status?.[`ema_${kind}_samples`];
      note.textContent = key === "ema_alpha" ? t("eta_alpha_help") : mean == null ? t("eta_unmeasured") : t("eta_measured", { mean: mean.toFixed(1), n });
    }
  }

  #add(key, limits) {
    const name = make("span");
    const note = make("small", { id: `${key}-note` });
    const input = make("input", { type: "number", id: key, min: 0, required: true, "aria-describedby": note.id, ...limits });
    byId("eta-fields").append(make("label", { class: "field" }, name, input, note));
    this.#fields.set(key, { input, name, note });
  }

  get #isChanged() {
    return this.#status !== null && [...this.#fields].some(([key, { input }]) => input.value !== String(this.#status.config[key]));
  }

  #fill() {
    for (const [key, { input }] of this.#fields) input.value = this.#status.config[key];
    this.#buttons();
  }

  #buttons() {
    byId("eta-save").disabled = byId("eta-reset").disabled = !this.#isChanged;
  }

  async #save() {
    const body = Object.fromEntries([...this.#fields].map(([key, { input }]) => [key, Number(input.value)]));
    await this.#act(async () => {
      this.#status = await sendJson("/api/config/eta", body, "PUT");
      this.#fill();
      this.redraw();
    }, t("done_eta"));
  }
}
