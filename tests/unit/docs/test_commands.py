"""Commands in the pages have flags that exist, with values that they take. Runs none of them."""

import re
import shlex
from pathlib import Path

import pytest

from pagoda.cli import make_parser
from pagoda_common.config.flags.words import dashed
from pagoda_frontend.__main__ import make_parser as frontend_parser
from pagoda_scheduler.__main__ import make_parser as scheduler_parser
from pagoda_worker.__main__ import make_parser as worker_parser

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^ *```(?:sh|bash)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SERVICES = {"pagoda-frontend": frontend_parser, "pagoda-scheduler": scheduler_parser, "pagoda-worker": worker_parser}


def commands(page: Path) -> list[str]:
    """The commands of a page that call Pagoda, each with its flags."""
    lines = [line for block in BLOCK.findall(page.read_text(encoding="utf-8")) for line in joined(block)]
    return [line for line in lines if line.split()[0] in ("pagoda", *SERVICES)]


def joined(block: str) -> list[str]:
    """Each command of a block, without comments and variables before it; a backslash continues a line."""
    lines = (re.sub(r"(^|\s+)#(\s.*)?$", "", line) for line in block.replace("\\\n", " ").splitlines())
    parts = (part.strip() for line in lines for part in line.split("&&"))
    return [command for part in parts if (command := re.sub(r"^(\w+=\S+ +)+", "", part))]


def parse(command: str) -> None:
    """Raises SystemExit where the program would."""
    name, *words = shlex.split(command)
    words = [word for word in words if word != "&"]
    if name == "pagoda":
        make_parser().parse_args(words)
    else:
        parser = SERVICES[name]()
        parser.parse_args(dashed(words, parser._option_string_actions)[0])


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_the_flags_of_a_page_are_taken(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = {}
    for command in commands(page):
        try:
            parse(command)
        except SystemExit as end:
            if end.code:
                refused[command] = capsys.readouterr().err
    assert refused == {}


def test_a_command_stands_without_its_comment_and_variables() -> None:
    block = "A=1 B=x,y pagoda serve M \\\n  --port 1   # a port\n# all\ncurl http://a/#b && pagoda top\n"
    assert joined(block) == ["pagoda serve M    --port 1", "curl http://a/#b", "pagoda top"]


@pytest.mark.parametrize("command", ["pagoda serve --nosuch", "pagoda-worker --max-model-len 3"])
def test_a_wrong_flag_is_found(command: str) -> None:
    with pytest.raises(SystemExit):
        parse(command)
