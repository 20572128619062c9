"""Hooks of mkdocs: links from docs/ to files elsewhere in the repository are shown as plain text on the site."""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+[^)\s]*\)")
"""A Markdown link to a file above docs/."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """`markdown` without links that lead out of the site; the pages on GitHub keep them."""
    return OUTSIDE.sub(r"\1", markdown)
