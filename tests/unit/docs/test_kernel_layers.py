"""The folders of the C++ kernels include each other in one direction only, as kernels/README.md draws it."""

import re
from pathlib import Path

CSRC = Path(__file__).parents[3] / "kernels" / "pagoda_kernels" / "native" / "csrc"
FLOORS = {"python": 5, "decoder": 4, "experts": 3, "attention": 2, "linear": 2, "recurrent": 2, "threads": 1, "simd": 0}
"""Higher ones include lower ones."""


def test_no_folder_includes_one_above_it_or_beside_it() -> None:
    sources = [path for path in CSRC.rglob("*") if path.suffix in (".cpp", ".h") and path.parent != CSRC]
    assert {path.parent.name for path in sources} == set(FLOORS)
    for path in sources:
        own = path.parent.name
        for other in re.findall(r'#include "(\w+)/', path.read_text()):
            assert other == own or FLOORS[other] < FLOORS[own], f"{path.name} of {own} includes {other}"


def test_the_page_names_every_folder() -> None:
    page = (Path(__file__).parents[3] / "kernels" / "README.md").read_text()
    folders = {path.parent.relative_to(CSRC.parents[1]).as_posix() for path in CSRC.parents[1].rglob("*.py")}
    assert [name for name in sorted(folders - {"."}) if f"`{name}/`" not in page and "csrc" not in name] == []
