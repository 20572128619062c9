// Which of several models the page shows: `?model=NAME` in its address, or else the first one.

let chosen = new URLSearchParams(location.search).get("model");

/** Ask the server for its models; where it has several, offer them. */
export async function choose() {
  const answer = await fetch("status/facts").catch(() => null);
  const names = answer?.ok ? (await answer.json()).several : undefined;
  if (!names) return;
  if (!names.includes(chosen)) [chosen] = names;
  document.getElementById("model").hidden = true; // the list has the name
  document.getElementById("models").replaceChildren(...names.map(link));
}

/** `path` of the server, for the model that is shown. */
export function of(path) {
  return chosen ? `${path}?model=${encodeURIComponent(chosen)}` : path;
}

/** `body` of a request, for the same model. */
export function asking(body) {
  return chosen ? { model: chosen, ...body } : body;
}

function link(name) {
  const anchor = document.createElement("a");
  anchor.href = `?model=${encodeURIComponent(name)}`;
  anchor.textContent = name;
  if (name === chosen) anchor.setAttribute("aria-current", "page");
  return anchor;
}
