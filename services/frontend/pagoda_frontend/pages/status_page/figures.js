// The figures: from samples of /metrics to the elements of the page.

import { addStep } from "./history.js";
import { growth, quantile, rate, total } from "./samples.js";

const STAGES = [
  ["schedule", "scheduler", 0, "The scheduler decides which tokens run."],
  ["encode", "scheduler", 1, "The scheduler writes the step as a message."],
  ["wire", "wire", 0, "The message travels to the worker, and the answer back."],
  ["queue", "worker", 3, "The step waits in the worker for the step before it."],
  ["prepare", "worker", 2, "The worker gathers the inputs of the step."],
  ["forward", "worker", 0, "The model computes."],
  ["sample", "worker", 1, "The worker chooses the next tokens."],
  ["decode", "scheduler", 2, "The scheduler reads the answer."],
  ["deliver", "scheduler", 3, "The scheduler hands the tokens to their streams."],
];
const CHART_SAMPLES = 120;
const MINUTE_MS = 60_000;
const samples = [];
const speeds = [];

const element = (id) => document.getElementById(id);
const show = (id, text) => { element(id).textContent = text; };

/** Take a scrape into account and show what it says. */
export function take(sample) {
  const before = samples.at(-1);
  samples.push(sample);
  while (samples.length > 2 && samples[1].at < sample.at - MINUTE_MS) samples.shift();
  showNow(sample);
  showGroups(sample);
  if (!before) return;
  const speed = rate(before, sample, "pagoda:sampled_tokens_total")
    ?? rate(before, sample, "vllm:generation_tokens_total");
  speeds.push(speed ?? 0);
  while (speeds.length > CHART_SAMPLES) speeds.shift();
  show("tokens", count(speed));
  const prompts = count(rate(before, sample, "vllm:prompt_tokens_total"));
  show("speed-note", `prompts ${prompts} · peak ${count(Math.max(...speeds))}`);
  drawChart();
  showStep(before, sample);
  for (const [id, name] of [["first-token", "time_to_first_token"], ["next-token", "inter_token_latency"]]) {
    const metric = `vllm:${name}_seconds`;
    const [middle, high, highest] = [0.5, 0.95, 0.99].map((share) => quantile(samples[0], sample, metric, share));
    show(id, seconds(middle));
    show(`${id}-note`, high === null ? "of the last minute" : `p95 ${seconds(high)} · p99 ${seconds(highest)}`);
  }
}

/** Tokens a second from before this page was loaded, one a point of PERIOD seconds each; drawn until the page has its own. */
export function begin(generated, period) {
  const repeats = Math.max(1, Math.round(period / 2));
  const past = generated.flatMap((speed) => Array(repeats).fill(speed)).slice(-CHART_SAMPLES);
  speeds.unshift(...past);
  while (speeds.length > CHART_SAMPLES) speeds.shift();
  if (speeds.length) drawChart();
}

/** Seconds as people read them. */
export function seconds(value) {
  if (value === null) return "–";
  if (value >= 100) return `${Math.round(value)} s`;
  if (value >= 1) return `${value.toPrecision(3)} s`;
  const ms = value * 1000;
  return `${ms >= 100 ? Math.round(ms) : ms.toPrecision(2)} ms`;
}

function count(value) {
  if (value === null) return "–";
  return value > 0 && value < 10 && !Number.isInteger(value) ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

function percent(share) {
  if (share === null || !Number.isFinite(share)) return "–";
  return share > 0 && share < 0.1 ? `${(share * 100).toFixed(1)} %` : `${Math.round(share * 100)} %`;
}

function showNow(sample) {
  const value = (name, labels) => total(sample, name, labels);
  const load = sample.series.get("vllm:num_requests_running")?.[0];
  if (load) {
    show("model", load.labels.model_name);
    document.title = `${load.labels.model_name} – Pagoda`;
  }
  show("running", count(value("vllm:num_requests_running")));
  show("waiting", count(value("vllm:num_requests_waiting")));
  const usage = value("vllm:kv_cache_usage_perc");
  show("kv", percent(usage));
  element("kv-meter").ariaValueNow = Math.round((usage ?? 0) * 100);
  element("kv-meter").firstElementChild.style.width = `${(usage ?? 0) * 100}%`;
  const cache = sample.series.get("vllm:cache_config_info")?.[0]?.labels;
  if (cache) show("kv-note", `of ${count(Number(cache.num_gpu_blocks) * Number(cache.block_size))} tokens`);
  show("prefix", percent(value("vllm:prefix_cache_hits_total") / value("vllm:prefix_cache_queries_total")));
  show("preemptions", count(value("vllm:num_preemptions_total")));
  const workers = value("pagoda:worker_losses_total") ?? 0;
  const schedulers = value("pagoda:scheduler_losses_total") ?? 0;
  show("recoveries", count(workers + schedulers));
  show("recoveries-note", workers + schedulers ? `workers ${workers}, schedulers ${schedulers}` : "no process was lost");
}

function drawChart() {
  const top = Math.max(...speeds, 1) * 1.08;
  const left = CHART_SAMPLES - speeds.length;
  const points = speeds.map((speed, index) => `${left + index + 0.5},${(39.5 - (38 * speed) / top).toFixed(2)}`);
  const line = `M${points.join("L")}`;
  show("chart-top", `${count(top / 1.08)} a second`);
  const area = `${line}L${CHART_SAMPLES - 0.5},39.5L${left + 0.5},39.5Z`;
  element("chart").replaceChildren(
    path("floor", `M0,39.5H${CHART_SAMPLES}`), path("area", area), path("line", line));
}

/** An SVG path of a class. */
export function path(name, d) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "path");
  made.setAttribute("class", name);
  made.setAttribute("d", d);
  return made;
}

function showStep(before, sample) {
  const means = STAGES.map(([stage]) => {
    const steps = growth(before, sample, "pagoda:step_seconds_count", { stage });
    return steps ? growth(before, sample, "pagoda:step_seconds_sum", { stage }) / steps : 0;
  });
  const whole = means.reduce((sum, mean) => sum + mean, 0);
  const steps = rate(before, sample, "pagoda:step_seconds_count", { stage: "deliver" });
  addStep(whole ? STAGES.map(([stage, owner, shade], index) => ({ stage, owner, shade, mean: means[index] })) : null);
  if (!whole) {
    show("step-note", "no step in the last seconds");
    return; // the last steps stay in view
  }
  show("step-note", `${seconds(whole)} from its schedule to its tokens, ${count(steps)} steps a second`);
  if (!element("step-bar").children.length) {
    for (const [stage, owner, shade, meaning] of STAGES) {
      element("step-bar").append(swatch(owner, shade));
      const item = document.createElement("li");
      item.title = `${stage} (${owner}): ${meaning}`;
      item.append(swatch(owner, shade), stage, document.createElement("b"));
      element("step-stages").append(item);
    }
  }
  STAGES.forEach((_, index) => {
    element("step-bar").children[index].style.flexGrow = means[index] / whole;
    element("step-stages").children[index].lastChild.textContent = seconds(means[index]);
  });
}

function swatch(owner, shade) {
  const made = document.createElement("i");
  made.dataset.owner = owner;
  made.dataset.shade = shade;
  return made;
}

function showGroups(sample) {
  const groups = sample.series.get("pagoda:group_info") ?? [];
  const rows = groups.map(({ labels }) => {
    const of = (name) => total(sample, `pagoda:group_${name}`, { group: labels.group });
    return [labels.group, labels.state, labels.device, count(of("requests_running")),
      count(of("requests_waiting")), percent(of("kv_cache_usage_perc"))];
  });
  if (!rows.length) rows.push(["–", "none has registered", "", "", "", ""]);
  element("groups").replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    row.append(...cells.map((text) => {
      const cell = document.createElement("td");
      cell.textContent = text;
      return cell;
    }));
    return row;
  }));
}
