"""Write the generated parts of the pages in docs/: ``python scripts/docs_pages.py``.

A generated part stands between two comments, `<!-- NAME: begin -->` and `<!-- NAME: end -->`. The test
tests/unit/docs/test_generated_pages.py fails when a page is older than what it is made from.
"""

import argparse
import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pagoda.commands import serve
from pagoda.commands.arguments import CommandParser
from pagoda.options import refusals
from pagoda.options.vllm_options import OPTIONS, REFUSED_FLAGS, VllmOption
from pagoda_common.config.settings import option_actions

DOCS = Path(__file__).resolve().parents[1] / "docs"
COMPATIBILITY = "accepted for compatibility with vLLM"


def serve_parser() -> argparse.ArgumentParser:
    """The parser of `pagoda serve`."""
    parser = CommandParser(prog="pagoda serve", add_help=False)
    parser.fill_later(serve.add_arguments)
    parser.fill()
    return parser


def rows(head: Iterable[str], cells: Iterable[Iterable[str]]) -> str:
    """A table of Markdown."""
    names = list(head)
    lines = [names, ["---"] * len(names), *([cell.replace("|", "\\|") for cell in row] for row in cells)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def settings() -> str:
    """The flags of `pagoda serve` by group."""
    parser = serve_parser()
    known = {action.dest for action in option_actions(parser).values()}
    parts = []
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.dest in known]
        if group.title == COMPATIBILITY or not actions:
            continue
        table = rows(("flag", "variable", "default", "what it does"), (_setting(action) for action in actions))
        parts.append(f"## {str(group.title).capitalize()}\n\n{table}")
    return "\n\n".join(parts)


def _setting(action: argparse.Action) -> tuple[str, str, str, str]:
    flag = next(name for name in action.option_strings if name.startswith("--"))
    value = f" {action.metavar}" if isinstance(action.metavar, str) else ""
    if action.choices is not None:
        value = f" {{{','.join(map(str, action.choices))}}}"
    text = re.sub(r" ?\(default: .*\)$", "", action.help or "")
    default = re.search(r"\(default: (.*)\)$", action.help or "")
    shown = default[1] if default else ""
    if "%(default)s" in shown:
        shown = str(action.default)
    return f"`{flag}{value}`", f"`PAGODA_{flag[2:].replace('-', '_').upper()}`", shown, text


def flags() -> str:
    """What becomes of vLLM's flags: those that are taken, then those that are not."""
    own = [
        next(name for name in action.option_strings if name.startswith("--"))
        for group in serve_parser()._action_groups
        if group.title != COMPATIBILITY
        for action in group._group_actions
        if action.option_strings and action.dest != "help"
    ]
    taken = {flag for flag in own if not flag.startswith("--no-")}
    others = [(f"`{option.flags[0]}`", *_state(option)) for option in OPTIONS if option.flags[0] not in taken]
    others += [(f"`{flag}`", "refused", reason) for flag, reason in REFUSED_FLAGS.items() if flag not in taken]
    table = rows(("flag", "state", "why"), sorted(others))
    listed = ", ".join(f"`{flag}`" for flag in sorted(taken))
    return f"**Taken** ([what each does](settings.md)): {listed}.\n\n{table}"


def _state(option: VllmOption) -> tuple[str, str]:
    if option.neutral is None:
        return "no effect", option.reason
    values = [str(value) for value in dict.fromkeys(map(str, option.neutral)) if value not in ("False", "{}", "")]
    return (f"only {' or '.join(values)}" if values else "refused"), option.reason


def refused_calls() -> str:
    """The calls that `LLM` refuses, with the reason that the call gives."""
    tree = ast.parse(inspect.getsource(refusals.RefusedCalls))
    return rows(("call", "why"), ((f"`{name}`", reason) for name, reason in _refusals(tree)))


def _refusals(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        texts = [node.value for node in ast.walk(function.body[-1]) if isinstance(node, ast.Constant)]
        yield function.name, str(texts[1]) if len(texts) > 1 else "models generate; `embed` gives embeddings"


PARTS: dict[str, tuple[tuple[str, Callable[[], str]], ...]] = {
    "migration.md": (("refused calls", refused_calls), ("flags", flags)),
    "settings.md": (("settings", settings),),
}
"""Generated parts by page."""


def with_part(page: str, name: str, text: str) -> str:
    """`page` with `text` between the marks of `name`.

    Raises:
        ValueError: a mark is missing.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page must have {begin} and {end} once each")
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"


def generated(name: str) -> str:
    """The page as it should be."""
    page = (DOCS / name).read_text(encoding="utf-8")
    for part, make in PARTS[name]:
        page = with_part(page, part, make())
    return page


if __name__ == "__main__":
    for name in PARTS:
        (DOCS / name).write_text(generated(name), encoding="utf-8")
