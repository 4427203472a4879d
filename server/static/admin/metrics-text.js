/** Prometheus' text format: samples, sums and quantiles of histograms. */

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

export class Metrics {
  #samples = new Map(); // name -> [{labels, value}]

  /** @param {string} text of GET /metrics */
  constructor(text) {
    for (const line of text.split("\n")) {
      const [, name, labels = "", value] = line.match(LINE) ?? [];
      if (!name) continue;
      const sample = { labels: Object.fromEntries([...labels.matchAll(LABEL)].map(([, key, given]) => [key, given])), value: numberOf(value) };
      if (this.#samples.has(name)) this.#samples.get(name).push(sample);
      else this.#samples.set(name, [sample]);
    }
  }

  /** Samples of a name with these labels. */
  all(name, labels = {}) {
    const wanted = Object.entries(labels);
    return (this.#samples.get(name) ?? []).filter((one) => wanted.every(([key, value]) => one.labels[key] === value));
  }

  /** Their sum; null without a sample. */
  sum(name, labels = {}) {
    const found = this.all(name, labels);
    return found.length ? found.reduce((total, { value }) => total + value, 0) : null;
  }

  /** The upper bound of the bucket with this share of a histogram's values; null without values. */
  quantile(name, share, labels = {}) {
    const buckets = new Map();
    for (const { labels: own, value } of this.all(`${name}_bucket`, labels)) {
      const bound = numberOf(own.le);
      buckets.set(bound, (buckets.get(bound) ?? 0) + value);
    }
    const total = buckets.get(Infinity) ?? 0;
    if (!total) return null;
    return [...buckets].sort(([a], [b]) => a - b).find(([, count]) => count >= share * total)[0];
  }
}

const numberOf = (text) => (text === "+Inf" ? Infinity : text === "-Inf" ? -Infinity : Number(text));
