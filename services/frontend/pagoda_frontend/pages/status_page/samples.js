// Prometheus' text format to numbers, and what two samples say about the time between them. Knows no page.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** A scrape: {at (ms), series: Map of metric name to [{labels, value}]}. */
export function parse(text, at) {
  const series = new Map();
  for (const line of text.split("\n")) {
    if (!line || line[0] === "#") continue;
    const match = LINE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) labels[name] = value.replace(/\\(.)/g, "$1");
    if (!series.has(match[1])) series.set(match[1], []);
    series.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return { at, series };
}

/** The sum of a metric over the series whose labels include `labels`; null where there is none. */
export function total(sample, name, labels = {}) {
  const found = (sample.series.get(name) ?? []).filter((one) => matches(one.labels, labels));
  return found.length ? found.reduce((sum, one) => sum + one.value, 0) : null;
}

/** Growth of a counter between two samples; what it has, when it began again between them. */
export function growth(before, now, name, labels = {}) {
  const end = total(now, name, labels);
  const start = total(before, name, labels) ?? 0;
  if (end === null) return null;
  return end >= start ? end - start : end;
}

/** The same a second. */
export function rate(before, now, name, labels = {}) {
  const grown = growth(before, now, name, labels);
  return grown === null || now.at <= before.at ? null : (grown * 1000) / (now.at - before.at);
}

/** Quantile of what a histogram has observed between two samples, linear within a bucket; null without observations. */
export function quantile(before, now, name, share) {
  const start = buckets(before, name);
  const end = buckets(now, name);
  if (!end.length) return null;
  const last = end.length - 1;
  const isNew = !start.length || start[last].count > end[last].count;
  const counts = end.map((one, index) => one.count - (isNew ? 0 : start[index].count));
  const wanted = counts[last] * share;
  if (!counts[last]) return null;
  const place = counts.findIndex((count) => count >= wanted);
  const low = place ? end[place - 1].bound : 0;
  if (place === last) return low;
  const below = place ? counts[place - 1] : 0;
  return low + ((end[place].bound - low) * (wanted - below)) / (counts[place] - below);
}

function buckets(sample, name) {
  const sums = new Map();
  for (const { labels, value } of sample.series.get(`${name}_bucket`) ?? []) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    sums.set(bound, (sums.get(bound) ?? 0) + value);
  }
  return [...sums].map(([bound, count]) => ({ bound, count })).sort((a, b) => a.bound - b.bound);
}

function matches(labels, wanted) {
  return Object.entries(wanted).every(([name, value]) => labels[name] === value);
}
