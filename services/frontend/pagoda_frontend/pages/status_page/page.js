// Wires the page: asks for the figures every two seconds while someone looks, keeps the theme, starts the chat.

import * as chat from "./chat.js";
import { begin, seconds, take } from "./figures.js";
import * as history from "./history.js";
import * as model from "./model.js";
import * as requests from "./calls.js";
import { parse } from "./samples.js";
import * as tokens from "./tokens.js";

const PERIOD_MS = 2000;
const TIMEOUT_MS = 8000;
const HISTORY_TURNS = 3; // looks between two questions for the past
const THEME = "pagoda-theme";
const element = (id) => document.getElementById(id);
let hasBeenReady = false;
let lastAnswer = null; // Date of the last scrape that came
let turns = 0;

async function follow() {
  await model.choose();
  for (;;) {
    if (!document.hidden) await look();
    await new Promise((resolve) => { setTimeout(resolve, PERIOD_MS); });
  }
}

async function look() {
  const signal = AbortSignal.timeout(TIMEOUT_MS);
  try {
    const [metrics, ready] = await Promise.all([fetch(model.of("metrics"), { signal }), fetch("ready", { signal })]);
    take(parse(await metrics.text(), performance.now()));
    lastAnswer = new Date();
    setGone(false);
    hasBeenReady ||= ready.ok;
    if (ready.ok) setState("ready", "ready");
    else setState(hasBeenReady ? "lost" : "starting", (await ready.json()).error?.message ?? "not ready");
    await requests.look(signal);
    await past(signal);
  } catch {
    setState("away", "no answer");
    setGone(true);
  }
}

/** The past, and the facts, which change seldom. */
async function past(signal) {
  const isFirst = turns === 0;
  if (turns++ % HISTORY_TURNS) return;
  const columns = await history.look(signal);
  if (isFirst && columns?.generated) begin(columns.generated, 5);
  const answer = await fetch(model.of("status/facts"), { signal });
  if (answer.ok) showFacts(await answer.json());
}

function showFacts(facts) {
  const shown = {
    model: facts.models?.join(", "),
    context: facts.max_model_len && `${facts.max_model_len.toLocaleString("en")} tokens`,
    vocabulary: facts.vocab_size?.toLocaleString("en"),
    "chat template": facts.has_chat_template === undefined ? undefined : facts.has_chat_template ? "yes" : "no",
    "tool parser": facts.tool_call_parser ?? "none",
    "reasoning parser": facts.reasoning_parser ?? "none",
    "API key": facts.needs_key ? "asked for" : "none",
    up: seconds(facts.uptime_s),
    Pagoda: facts.version,
    Python: facts.python,
  };
  const rows = Object.entries(shown).filter(([, value]) => value !== undefined).flatMap(([name, value]) => {
    const term = document.createElement("dt");
    const text = document.createElement("dd");
    term.textContent = name;
    text.textContent = value;
    return [term, text];
  });
  element("facts").replaceChildren(...rows);
}

/** Grey all figures: they are those of the last answer. */
function setGone(is) {
  document.body.classList.toggle("gone", is);
  element("gone").hidden = !is;
  if (!is) return;
  const since = lastAnswer ? `since ${lastAnswer.toLocaleTimeString()}` : "yet";
  const text = `The server has not answered ${since}. The figures below are its last ones; this page keeps asking.`;
  if (element("gone").textContent !== text) element("gone").textContent = text;
}

function setState(state, text) {
  element("state").dataset.state = state;
  if (element("state-text").textContent !== text) element("state-text").textContent = text;
}

function startTheme() {
  const root = document.documentElement;
  const kept = localStorage.getItem(THEME);
  if (kept) root.dataset.theme = kept;
  element("theme").addEventListener("click", () => {
    const isDark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
    localStorage.setItem(THEME, root.dataset.theme);
  });
}

async function showVersion() {
  const answer = await fetch("version").catch(() => null);
  if (answer?.ok) element("version").textContent = `Pagoda ${(await answer.json()).version}`;
}

startTheme();
showVersion();
chat.start();
tokens.start();
follow();
