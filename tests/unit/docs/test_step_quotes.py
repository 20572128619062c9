"""docs/architecture.md quotes the engine's step: the code says the same."""

import inspect
import re
import textwrap
from pathlib import Path

from pagoda_scheduler.engine.engine_core import EngineCore

PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"


def test_the_quoted_step_of_the_engine_is_the_code() -> None:
    quotes = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert textwrap.dedent(inspect.getsource(EngineCore.step)) in quotes
