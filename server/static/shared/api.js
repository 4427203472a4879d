/** Requests to the server's HTTP API. */

/** Fetch JSON. @returns {Promise<any>} @throws {Error} for another status than 2xx, with the server's `detail` */
export async function fetchJson(path, options = {}) {
  const response = await fetch(path, options);
  if (response.ok) return response.json();
  const detail = await response.json().then((body) => body.detail, () => null);
  const text = typeof detail === "string" ? `: ${detail}` : "";
  throw Object.assign(new Error(`${path}: expected status 200, got ${response.status}${text}`), { status: response.status });
}

/** Send JSON. @returns {Promise<any>} @throws {Error} */
export function sendJson(path, body, method = "POST") {
  return fetchJson(path, { method, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}
