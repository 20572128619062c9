"""Names words that make a text hard to read, and the word to use: ``python scripts/check_words.py [FILE …]``.

Without files it reads every tracked text. Exit code 1 when a word of the list stands anywhere.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".md", ".py", ".proto", ".cpp", ".h", ".js", ".html", ".yaml", ".yml"}
EXEMPT = {
    *("scripts/check_words.py", "tests/unit/docs/test_words.py"),  # this list itself
    *("docs/http_reference.md", "docs/grpc_reference.md", "docs/settings.md", "docs/metrics.md"),  # made from sources
    *("training/pagoda_tiny/stories.py", "training/pagoda_tiny/talk.py"),  # stories for children
}
PLACES = r"(?:a|the|one|its|this|an|HAProxy's) (?:\w+ )?(?:proxy|proxies|balancer|gateway|firewall|load balancer)"
WORDS = {
    rf"\bbehind\b(?! {PLACES})": "after (in time or order), below, in",
    r"\bnobody\b": "no one, or what does not happen",
    r"\bsomebody\b": "someone, or who it is",
    r"\bwhoever\b": "who it is: the caller, the client",
    r"\b(?:go|goes|going|gone|went) on with\b": "continue, resume",
    r"\bwhatsoever\b": "at all",
    r"\b(?:is|are|was|were) told of\b": "gets, learns, reads",
    r"\b(?:go|goes|going|gone|went) on (?:elsewhere|serving|computing)\b": "continue",
    r"\banew\b": "again",
    r"\bso as to\b": "to",
    r"\b(?:is|are) no (?:JSON|UTF-8|GGUF|Jinja|schema|literal|regular expression|token id|matrix|text)\b": "is not a",
    r"\bfor ever\b": "forever, without end",
    r"\bby turns\b": "in turns",
    r"\belsewhere than\b": "not on, not at",
    r"\bvery (?:tokens|texts?|words)\b": "exactly these tokens, the same tokens",
    r"\b(?:lest|whence|thence|albeit|thereby|hitherto|be it)\b": "so that not, from which, although, by this, whether",
    r"\bby whom(?:ever)?\b": "by which caller, by which client",
    r"\bfor want of\b": "because there is no",
    r"\bwhere (?:vLLM|OpenAI) has (?:it|them)\b": "under vLLM's name",
}
"""Patterns (any case), and what to write instead."""
RIGHT = (
    r"\b(?:leave|leaves|left)\b.{0,40}? behind\b",  # what remains
    r"\b(?:is|was|far|messages|batches|steps) behind\b",  # what lags
    r"[\"'/-](?:nobody|behind)[\"'/-]",  # a value in quotes, a part of a path or of a key
)
"""Where a word of the list is right."""
ANY_WORD = re.compile("|".join(WORDS), re.IGNORECASE)


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """Line number from 1, the word, what to write, for each word of the list in `text`."""
    if not ANY_WORD.search(text):  # as in nearly every text, and ten times as fast
        return
    for number, line in enumerate(text.splitlines(), start=1):
        for right in RIGHT:
            line = re.sub(right, "", line)
        for pattern, better in WORDS.items():
            for match in re.finditer(pattern, line, re.IGNORECASE):
                yield number, match[0], better


def tracked() -> list[Path]:
    """The texts of the repository."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / name for name in names if Path(name).suffix in SUFFIXES]


def main(arguments: list[str]) -> int:
    """Print each finding; the exit code."""
    count = 0
    for path in [Path(name).resolve() for name in arguments] or tracked():
        name = str(path.relative_to(ROOT))
        if name in EXEMPT or path.suffix not in SUFFIXES or "node_modules" in path.parts:
            continue
        for number, word, better in findings(path.read_text(encoding="utf-8")):
            print(f"{name}:{number}: {word!r}: write {better}")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
