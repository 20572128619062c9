// The tokenizer's view of a text: each token in a box, with its number.

import { headers } from "./chat.js";
import { asking } from "./model.js";

const MAX_SHOWN = 2000;
const WAIT_MS = 300;
const element = (id) => document.getElementById(id);
let timer = null;

/** Wire the box: it asks when typing rests. */
export function start() {
  element("tokens-text").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(ask, WAIT_MS);
  });
}

async function ask() {
  const prompt = element("tokens-text").value;
  if (!prompt) {
    show([], "");
    return;
  }
  const answer = await fetch("tokenize", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify(asking({ prompt, return_token_strs: true })),
  }).catch(() => null);
  if (!answer) return;
  const body = await answer.json();
  if (element("tokens-text").value !== prompt) return; // a later answer is on its way
  if (!answer.ok) {
    show([], body.error?.message ?? String(body.error ?? "The server gave no reason."));
    return;
  }
  const boxes = body.tokens.slice(0, MAX_SHOWN).map((id, index) => box(id, body.token_strs?.[index] ?? ""));
  const rest = body.count > MAX_SHOWN ? `, the first ${MAX_SHOWN} are shown` : "";
  show(boxes, `${body.count} tokens of ${prompt.length} characters${rest}`);
}

function box(id, text) {
  const made = document.createElement("span");
  made.className = "piece";
  made.textContent = text;
  made.title = `token ${id}`;
  return made;
}

function show(boxes, note) {
  element("tokens-pieces").replaceChildren(...boxes);
  element("tokens-note").textContent = note;
}
