// Wires the page: asks for the figures every two seconds while somebody looks, keeps the theme, starts the chat.

import * as chat from "./chat.js";
import { take } from "./figures.js";
import { parse } from "./samples.js";

const PERIOD_MS = 2000;
const TIMEOUT_MS = 8000;
const THEME = "pagoda-theme";
const element = (id) => document.getElementById(id);
let hasBeenReady = false;
let lastAnswer = null; // Date of the last scrape that came

async function follow() {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise((resolve) => { setTimeout(resolve, PERIOD_MS); });
  }
}

async function look() {
  const signal = AbortSignal.timeout(TIMEOUT_MS);
  try {
    const [metrics, ready] = await Promise.all([fetch("metrics", { signal }), fetch("ready", { signal })]);
    take(parse(await metrics.text(), performance.now()));
    lastAnswer = new Date();
    setGone(false);
    hasBeenReady ||= ready.ok;
    if (ready.ok) setState("ready", "ready");
    else setState(hasBeenReady ? "lost" : "starting", (await ready.json()).error?.message ?? "not ready");
  } catch {
    setState("away", "no answer");
    setGone(true);
  }
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
follow();
