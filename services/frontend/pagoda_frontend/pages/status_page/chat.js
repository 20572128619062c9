// The small chat: one conversation with /v1/chat/completions, streamed, with a way to stop.

import { seconds } from "./figures.js";
import { render } from "./markdown.js";

const KEY = "pagoda-api-key";
const element = (id) => document.getElementById(id);
const conversation = [];
let running = null; // AbortController of the answer that streams
let lastBody = null; // of the last request, for Copy

/** Headers of a call of the API; the key stays in this tab. */
export function headers() {
  const key = element("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Wire the form; ask once whether the API wants a key. */
export async function start() {
  element("key").value = sessionStorage.getItem(KEY) ?? "";
  element("key").addEventListener("change", () => sessionStorage.setItem(KEY, element("key").value.trim()));
  element("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  element("stop").addEventListener("click", () => running?.abort());
  element("clear").addEventListener("click", clear);
  element("copy-curl").addEventListener("click", () => copy("copy-curl", asCurl()));
  element("copy-python").addEventListener("click", () => copy("copy-python", asPython()));
  element("messages").addEventListener("click", (event) => showAlternatives(event.target));
  element("alternatives").addEventListener("click", () => { element("alternatives").hidden = true; });
  element("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  const answer = await fetch("v1/models", { headers: headers() }).catch(() => null);
  if (answer?.status === 401) element("key-row").hidden = false;
}

function clear() {
  running?.abort();
  conversation.length = 0;
  element("messages").replaceChildren();
  element("clear").hidden = true;
}

async function send() {
  const text = element("question").value.trim() || (conversation.length ? "" : element("question").placeholder);
  if (!text || running) return;
  element("question").value = "";
  element("messages").querySelector(".empty")?.remove();
  add("user").textContent = text;
  const shown = add("assistant running");
  const question = { role: "user", content: text };
  running = new AbortController();
  setRunning(true);
  const answer = { text: "", started: performance.now(), first: null, tokens: 0, usage: null, needsKey: false };
  try {
    await stream([...conversation, question], shown, answer);
  } catch (error) {
    if (error.name !== "AbortError") append(shown, "fault", error.message);
  }
  if (answer.needsKey && !element("question").value) element("question").value = text; // to be sent again with a key
  shown.classList.remove("running");
  if (answer.text) conversation.push(question, { role: "assistant", content: answer.text });
  if (answer.text && element("markdown").checked && !element("inspect").checked) formatted(shown, answer.text);
  if (answer.first !== null) append(shown, "facts", facts(answer, running.signal.aborted));
  running = null;
  setRunning(false);
  if (answer.needsKey) element("key").focus();
  scroll();
}

/** The answer's text as Markdown; thoughts and faults stay as they are. */
function formatted(shown, text) {
  const made = document.createElement("div");
  made.className = "markdown";
  made.append(...render(text));
  const kept = [...shown.children].filter((child) => ["thought", "fault"].includes(child.className));
  shown.replaceChildren(...kept.filter((child) => child.className === "thought"), made, ...kept.filter((child) => child.className === "fault"));
}

async function stream(messages, shown, answer) {
  const body = requestBody(messages);
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify(body),
    signal: running.signal,
  });
  if (response.status === 401) {
    element("key-row").hidden = false;
    answer.needsKey = true;
    throw new Error("The server asks for an API key.");
  }
  if (!response.ok) throw new Error(message(await response.text()));
  for await (const data of events(response.body)) {
    const event = JSON.parse(data);
    if (event.error) throw new Error(message(data));
    answer.usage = event.usage ?? answer.usage;
    const delta = event.choices?.[0]?.delta ?? {};
    const thought = delta.reasoning ?? "";
    if (!thought && !delta.content) continue;
    answer.first ??= performance.now();
    answer.tokens += 1;
    answer.text += delta.content ?? "";
    if (thought) append(shown, "thought", thought);
    const tokens = event.choices[0].logprobs?.content ?? [];
    if (tokens.length) shown.append(...tokens.map(inspectable));
    else if (delta.content) shown.append(delta.content);
    scroll();
  }
}

function requestBody(messages) {
  const system = element("system").value.trim();
  const body = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const [id, name] of [["temperature", "temperature"], ["max-tokens", "max_tokens"]]) {
    if (element(id).value !== "") body[name] = Number(element(id).value);
  }
  if (element("inspect").checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  lastBody = body;
  return body;
}

/** A token of the answer that can be clicked. */
function inspectable(token) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = "token";
  made.textContent = token.token;
  made.style.setProperty("--doubt", String(1 - Math.exp(token.logprob)));
  made.dataset.alternatives = JSON.stringify([token, ...token.top_logprobs.filter((one) => one.token !== token.token)]);
  return made;
}

function showAlternatives(clicked) {
  if (!clicked.dataset?.alternatives) return;
  const rows = JSON.parse(clicked.dataset.alternatives).map(({ token, logprob }) => {
    const row = document.createElement("tr");
    for (const text of [JSON.stringify(token), `${(100 * Math.exp(logprob)).toFixed(1)} %`, logprob.toFixed(3)]) {
      const cell = document.createElement("td");
      cell.textContent = text;
      row.append(cell);
    }
    return row;
  });
  const table = document.createElement("table");
  table.append(...rows);
  element("alternatives").replaceChildren(table);
  element("alternatives").hidden = false;
}

/** The last request, or the one that Send would make now, without the page's streaming. */
function plainBody() {
  const text = element("question").value.trim() || element("question").placeholder;
  const { stream, stream_options: options, ...body } = lastBody ?? requestBody([{ role: "user", content: text }]);
  return { model: element("model").textContent, ...body };
}

function asCurl() {
  const quoted = JSON.stringify(plainBody(), null, 2).replaceAll("'", "'\\''");
  const key = element("key-row").hidden ? "" : " \\\n  -H 'Authorization: Bearer YOUR_KEY'";
  return `curl ${new URL("v1/chat/completions", location.href)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${quoted}'`;
}

function asPython() {
  const { model, messages, ...others } = plainBody();
  const python = (value) => JSON.stringify(value, null, 4).replace(/\b(true|false|null)\b(?=[,\s\]}]|$)/g, (word) => ({
    true: "True", false: "False", null: "None" })[word]);
  const rest = Object.entries(others).map(([name, value]) => `    ${name}=${python(value)},\n`).join("");
  const key = element("key-row").hidden ? "none" : "YOUR_KEY";
  return `from openai import OpenAI\n\nclient = OpenAI(base_url="${new URL("v1", location.href)}", api_key="${key}")\n`
    + `answer = client.chat.completions.create(\n    model=${JSON.stringify(model)},\n    messages=${python(messages)},\n${rest})\n`
    + "print(answer.choices[0].message.content)\n";
}

async function copy(id, text) {
  const button = element(id);
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed"; // a page without HTTPS may not write the clipboard
    append(add("assistant"), "code", text);
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}

/** The data of each server-sent event, up to [DONE]. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The connection broke.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield data;
    }
  }
}

function facts(answer, isStopped) {
  const tokens = answer.usage?.completion_tokens ?? answer.tokens;
  const took = (performance.now() - answer.first) / 1000;
  const parts = [`${tokens} tokens`, `first after ${seconds((answer.first - answer.started) / 1000)}`];
  if (tokens > 1 && took > 0) parts.push(`${Math.round((tokens - 1) / took)} a second`);
  if (isStopped) parts.push("stopped");
  return parts.join(" · ");
}

function message(text) {
  try {
    const { error } = JSON.parse(text);
    return error.message ?? String(error);
  } catch {
    return text.slice(0, 500) || "The server gave no reason.";
  }
}

function setRunning(is) {
  element("send").hidden = is;
  element("stop").hidden = !is;
  element("clear").hidden = !element("messages").children.length;
  element("messages").ariaBusy = is;
  if (!is) element("question").focus({ preventScroll: true }); // send() moves it on to the key after a 401
}

function add(kind) {
  const made = document.createElement("div");
  made.className = `message ${kind}`;
  element("messages").append(made);
  scroll();
  return made;
}

function append(shown, kind, text) {
  let last = shown.lastChild;
  if (last?.className !== kind || kind !== "thought") {
    last = document.createElement("span");
    last.className = kind;
    shown.append(last);
  }
  last.append(text);
}

function scroll() {
  const box = element("messages");
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
}
