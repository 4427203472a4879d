/** The compile report of one worker in a dialog. */

import { fetchJson } from "../../shared/api.js";
import { byId, make } from "../../shared/dom.js";
import { t } from "../../shared/i18n.js";

const COLUMNS = {
  region: (row) => [row.name, row.part].filter(Boolean).join(" "),
  bucket: (row) => Object.entries(row.bucket ?? {}).map(([key, value]) => `${key}=${value}`).join(" "),
  eager: (row) => row.eager?.p50_ms?.toFixed(2),
  compiled: (row) => (row.error && !row.compiled ? t("report_failed") : row.compiled?.p50_ms?.toFixed(2)),
  captured: (row) => row.captured?.p50_ms?.toFixed(2),
  breaks: (row) => row.graph_breaks?.reduce((sum, one) => sum + one.count, 0),
  recompiles: (row) => row.recompiles?.length,
  late: (row) => row.n_late,
  graphs: (row) => row.cuda_graphs,
  seconds: (row) => row.compile_s?.toFixed(1),
  equal: (row) => row.equivalence && t(row.equivalence.is_equal ? "yes" : "no"),
};

/** Fetch and show the report of a worker. */
export async function showReport(id) {
  byId("report-title").textContent = t("report_of", { id });
  byId("report-machine").textContent = t("report_loading");
  byId("report-problems").replaceChildren();
  byId("report-table").replaceChildren();
  byId("report").showModal();
  try {
    draw(await fetchJson(`/workers/${encodeURIComponent(id)}/compile_report`));
  } catch (error) {
    byId("report-machine").textContent = t(error.status === 404 || error.status === 503 ? "report_none" : "report_error", { text: error.message });
  }
}

function draw({ header = {}, rows = [], live }) {
  const versions = [header.device, header.torch && `torch ${header.torch}`, header.cuda && `CUDA ${header.cuda}`, header.date];
  byId("report-machine").textContent = versions.filter(Boolean).join(" · ");
  const counted = live ? ["compiles", "recompiles", "graph_breaks", "graph_skips", "failures"].filter((key) => live[key]) : [];
  byId("report-problems").replaceChildren(
    ...counted.map((key) => make("li", {}, t("report_since_warm_up", { n: live[key], what: key.replaceAll("_", " ") }))),
    ...rows.filter(({ error }) => error).map(({ name, error }) => make("li", {}, `${name}: ${error}`)));
  const head = make("tr", {}, ...Object.keys(COLUMNS).map((key) => make("th", { scope: "col" }, t(`report_${key}`))));
  const body = rows.map((row) => make("tr", {}, ...Object.values(COLUMNS).map((cell) => make("td", {}, String(cell(row) ?? "–")))));
  byId("report-table").replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
}
