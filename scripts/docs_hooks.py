"""Hooks of mkdocs: pages from elsewhere in the repository, and links out of docs/.

Pages on GitHub keep their links. On the site, a link to a page of PAGES leads to its copy; a link to any other file
becomes text with the file's path.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "benchmarks/results/README.md": "results.md",
    "benchmarks/results/engines_cpu.md": "results_engines.md",
    "benchmarks/results/services.md": "results_services.md",
    "benchmarks/results/kernels_cpu.md": "results_kernels.md",
    "benchmarks/cpu/README.md": "workloads.md",
    "examples/clients/README.md": "clients.md",
}
"""Pages outside of docs/, by their path, with their name on the site."""
LISTS = {
    "grpc_reference.md",
    "http_reference.md",
    "changelog.md",
    "metrics.md",
    *(n for n in PAGES.values() if "result" in n),
}
"""Pages to look things up: the search shows them after the others."""
SOURCES = {name: path for path, name in PAGES.items()}
LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:)([^)\s#]+)(#[^)\s]*)?\)")
"""A Markdown link to a file: text, address, anchor."""
FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """All files of the site, with the copies of PAGES."""
    for path, name in PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """`markdown` with links that hold on the site."""
    if page.file.src_uri in LISTS:
        page.meta["search"] = {"boost": 0.3}
    return with_site_links(markdown, page.file.src_uri)


def with_site_links(markdown: str, name: str) -> str:
    """`markdown` of the page `name`, with links that hold on the site; code stays."""
    folder = posixpath.dirname(SOURCES.get(name, f"docs/{name}"))
    parts = enumerate(FENCED.split(markdown))  # each second one is a block of code
    return "".join(part if at % 2 else LINK.sub(lambda link: _link(link, folder), part) for at, part in parts)


def _link(link: re.Match[str], folder: str) -> str:
    text, address, anchor = link[1], link[2], link[3] or ""
    path = posixpath.normpath(posixpath.join(folder, address))
    if path in PAGES:
        return f"[{text}]({PAGES[path]}{anchor})"
    if path.startswith("docs/"):
        return f"[{text}]({path.removeprefix('docs/')}{anchor})"
    return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"
