// A small part of Markdown as elements: headings, lists, quotes, code, emphasis, links. Text stays text: no HTML is read.

const FENCE = /^\s*(```|~~~)\s*([\w+-]*)\s*$/;
const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1|\*\*([^\s*](?:[\s\S]*?[^\s*])?)\*\*|\*([^\s*](?:[\s\S]*?[^\s*])?)\*|\[([^\]\n]+)\]\((https?:[^\s)]+)\)/;

/** Elements for `text`. */
export function render(text) {
  const made = [];
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  for (let at = 0; at < lines.length;) {
    const fence = FENCE.exec(lines[at]);
    if (fence) {
      const end = lines.findIndex((line, index) => index > at && line.trim() === fence[1]);
      const last = end === -1 ? lines.length : end;
      made.push(element("pre", element("code", lines.slice(at + 1, last).join("\n"))));
      at = last + 1;
    } else if (/^#{1,6}\s/.test(lines[at])) {
      made.push(inline("h3", lines[at].replace(/^#+\s+/, "")));
      at += 1;
    } else if (isItem(lines[at])) {
      const from = at;
      while (at < lines.length && isItem(lines[at])) at += 1;
      const isNumbered = /^\s*\d/.test(lines[from]);
      const list = element(isNumbered ? "ol" : "ul");
      if (isNumbered) list.start = Number.parseInt(lines[from], 10);
      list.append(...lines.slice(from, at).map((line) => inline("li", line.replace(/^\s*(?:[-*+]|\d+[.)])\s+/, ""))));
      made.push(list);
    } else if (/^>\s?/.test(lines[at])) {
      const from = at;
      while (at < lines.length && /^>\s?/.test(lines[at])) at += 1;
      made.push(inline("blockquote", lines.slice(from, at).map((line) => line.replace(/^>\s?/, "")).join("\n")));
    } else if (lines[at].trim() === "") {
      at += 1;
    } else {
      const from = at;
      while (at < lines.length && lines[at].trim() && !FENCE.test(lines[at]) && !/^(#{1,6}\s|>\s?)/.test(lines[at]) && !isItem(lines[at])) at += 1;
      made.push(inline("p", lines.slice(from, at).join("\n")));
    }
  }
  return made;
}

function isItem(line) {
  return /^\s*(?:[-*+]|\d{1,9}[.)])\s+\S/.test(line);
}

function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

/** `text` with emphasis, code and links. */
function inline(name, text) {
  const made = element(name);
  let rest = text;
  for (let match = INLINE.exec(rest); match; match = INLINE.exec(rest)) {
    made.append(rest.slice(0, match.index));
    const [, , code, strong, emphasis, label, address] = match;
    if (code !== undefined) made.append(element("code", code.trim()));
    else if (strong !== undefined) made.append(inline("strong", strong));
    else if (emphasis !== undefined) made.append(inline("em", emphasis));
    else made.append(link(label, address));
    rest = rest.slice(match.index + match[0].length);
  }
  made.append(rest);
  return made;
}

function link(label, address) {
  const made = element("a", label);
  made.href = address;
  made.rel = "noopener noreferrer nofollow";
  made.target = "_blank";
  return made;
}
