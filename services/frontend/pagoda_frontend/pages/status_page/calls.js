// The table of calls that run and that ran last, with a way to abort one. With keys it shows the caller's own.

import { headers } from "./chat.js";
import { seconds } from "./figures.js";

const MAX_ROWS = 20;
const element = (id) => document.getElementById(id);

/** Ask and show; nothing changes where the server gives no answer. */
export async function look(signal) {
  const answer = await fetch("status/requests", { headers: headers(), signal });
  element("requests-note").hidden = answer.status !== 401;
  if (!answer.ok) {
    element("requests").replaceChildren();
    return;
  }
  const { running, ended } = await answer.json();
  const rows = [...running, ...ended].slice(0, MAX_ROWS).map(row);
  element("requests-empty").hidden = rows.length > 0;
  element("requests").replaceChildren(...rows);
}

function row(call) {
  const made = document.createElement("tr");
  made.dataset.state = call.state;
  const age = call.duration_s ?? Date.now() / 1000 - call.started;
  const cells = [call.id, call.state, String(call.prompt_tokens), String(call.output_tokens), seconds(call.first_token_s), seconds(Math.max(0, age))];
  made.append(...cells.map((text) => {
    const cell = document.createElement("td");
    cell.textContent = text;
    return cell;
  }));
  made.title = call.reason;
  const last = document.createElement("td");
  if (call.state === "running") last.append(abortButton(call.id));
  made.append(last);
  return made;
}

function abortButton(id) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.textContent = "Abort";
  button.setAttribute("aria-label", `Abort ${id}`);
  button.addEventListener("click", async () => {
    button.disabled = true;
    const path = `status/requests/${encodeURIComponent(id)}/abort`;
    await fetch(path, { method: "POST", headers: headers() }).catch(() => null);
  });
  return button;
}
