// The past: what the server has kept, then what this page saw. Charts of latencies and of the stages of steps.

import { path, seconds } from "./figures.js";
import { of } from "./model.js";

const WIDTH = 180;
const HEIGHT = 40;
const LINES = ["p50", "p95", "p99"];
const MAX_STEPS = 60;
const steps = [];
const element = (id) => document.getElementById(id);

/** Ask for the past and draw it. */
export async function look(signal) {
  const answer = await fetch(of("status/history"), { signal });
  if (!answer.ok) return null;
  const { period_s: period, columns } = await answer.json();
  const times = columns.time ?? [];
  drawLatency("first-token-chart", "first_token", columns);
  drawLatency("next-token-chart", "next_token", columns);
  const minutes = Math.round((times.length * period) / 60);
  for (const id of ["first-token-start", "next-token-start"]) element(id).textContent = minutes ? `${minutes} min ago` : "now";
  return columns;
}

function drawLatency(id, name, columns) {
  const series = LINES.map((line) => columns[`${name}_${line}`] ?? []);
  const known = series.flat().filter((value) => value !== null);
  const top = known.length ? Math.max(...known) * 1.08 : 1;
  element(`${id}-top`).textContent = known.length ? seconds(top / 1.08) : "no tokens yet";
  const lines = series.map((values, index) => path(`line ${LINES[index]}`, broken(values, top)));
  element(id).replaceChildren(path("floor", `M0,${HEIGHT - 0.5}H${WIDTH}`), ...lines.reverse());
}

/** A line with gaps where there was nothing; a point alone is a short stroke. */
function broken(values, top) {
  const left = WIDTH - values.length;
  let d = "";
  values.forEach((value, index) => {
    if (value === null) return;
    const point = `${left + index + 0.5},${(HEIGHT - 0.5 - ((HEIGHT - 2) * value) / top).toFixed(2)}`;
    const before = index > 0 && values[index - 1] !== null;
    d += before ? `L${point}` : `M${point}h0.6`;
  });
  return d;
}

/** A step of the last seconds, by stage: [{owner, shade, stage, mean}], or null where there was none. */
export function addStep(stages) {
  steps.push(stages);
  while (steps.length > MAX_STEPS) steps.shift();
  const most = Math.max(...steps.map((step) => (step ?? []).reduce((sum, { mean }) => sum + mean, 0)), 1e-9);
  element("timeline-top").textContent = most > 1e-9 ? `${seconds(most)} a step` : "";
  element("timeline").replaceChildren(...steps.map((step) => column(step ?? [], most)));
}

function column(step, most) {
  const made = document.createElement("div");
  made.className = "step";
  for (const { owner, shade, mean } of step) {
    const part = document.createElement("i");
    part.dataset.owner = owner;
    part.dataset.shade = shade;
    part.style.height = `${(100 * mean) / most}%`;
    made.append(part);
  }
  made.title = step.map(({ stage, mean }) => `${stage} ${seconds(mean)}`).join(", ");
  return made;
}
