/** Connection quality from the latest results: 3 is good, 2 fair, 1 poor; and whether server or network is the cause. */

import { DEADLINE_MS, quantile } from "./stats.js";

const WINDOW = 10; // results
const SLOW_NETWORK_MS = { fair: 300, poor: 800 };

/**
 * @param {{reply_ms: number, wall_clock_ms: number, lag_ms?: number}[]} results newest last
 * @param {{unit: number}[]} gaps @returns {{level: 1|2|3, cause: "server"|"network"|null}}
 */
export function qualityOf(results, gaps) {
  const latest = results.slice(-WINDOW);
  if (!latest.length) return { level: 3, cause: null };
  const first = latest[0].unit;
  const network = quantile(latest.map((one) => one.reply_ms - one.wall_clock_ms - (one.lag_ms ?? 0)), 0.8);
  const server = quantile(latest.map((one) => one.wall_clock_ms + (one.lag_ms ?? 0)), 0.8);
  const recentGaps = gaps.filter((gap) => gap.unit >= first).length;
  const isServerSlow = server > DEADLINE_MS;
  if (isServerSlow || network > SLOW_NETWORK_MS.poor || recentGaps > 1) {
    return { level: 1, cause: isServerSlow ? "server" : "network" };
  }
  return network > SLOW_NETWORK_MS.fair || recentGaps ? { level: 2, cause: "network" } : { level: 3, cause: null };
}
