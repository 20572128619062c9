"""docs/troubleshooting.md: every message that it explains is one that the code can say."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SOURCES = ("client", "common", "services", "kernels")
OF_PYTHON = {"No module named 'pagoda'"}
"""What Python itself says."""
MESSAGES = [
    message
    for table in re.findall(r"^\| message \|.*\n\|---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    for message in re.findall(r"^\| [^|`]*`([^`]+)`", table, re.MULTILINE)
]


@cache
def texts() -> tuple[str, ...]:
    """Every text of the code, formatted ones with … in place of their values, and the Makefile."""
    found = [(ROOT / "Makefile").read_text(encoding="utf-8")]
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            if path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.append(
                        "".join(
                            str(getattr(value, "value", "…")) if isinstance(value, ast.Constant) else "…"
                            for value in node.values
                        )
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return tuple(found)


def is_said(message: str) -> bool:
    """Whether the parts of a message between its … stand in the texts of the code, a flag's name aside."""
    parts = [part for part in re.split(r"\s*…\s*", re.sub(r"^--\w*", "…", message)) if part]
    return all(any(part in text for text in texts()) for part in parts)


def test_the_page_has_messages() -> None:
    assert len(MESSAGES) > 15


@pytest.mark.parametrize("message", [message for message in MESSAGES if message not in OF_PYTHON])
def test_the_code_says_a_message(message: str) -> None:
    assert is_said(message)
