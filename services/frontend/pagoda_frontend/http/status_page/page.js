// Wires the page: asks for the figures every two seconds while somebody looks, keeps the theme, starts the chat.

import * as chat from "./chat.js";
import { take } from "./figures.js";
import { parse } from "./samples.js";

const PERIOD_MS = 2000;
const TIMEOUT_MS = 8000;
const THEME = "pagoda-theme";
const element = (id) => document.getElementById(id);

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
    if (ready.ok) setState("ready", "ready");
    else setState("waiting", (await ready.json()).error?.message ?? "not ready");
  } catch {
    setState("away", "no answer");
  }
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
