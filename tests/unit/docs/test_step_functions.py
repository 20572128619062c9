"""docs/architecture.md quotes the function that is a step: what it shows is the code."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
MODEL_RUNNER = ROOT / "services/worker/pagoda_worker/steps/model_runner.py"


def without_docstring(source: str) -> str:
    """The one function in a source, as Python reads it."""
    (function,) = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    function.decorator_list = []
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:]
    return ast.unparse(function)


def test_the_workers_step_is_quoted_as_it_is() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    quotes = [quote for quote in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "-> PendingStep" in quote]
    assert len(quotes) == 1
    tree = ast.parse(MODEL_RUNNER.read_text(encoding="utf-8"))
    (step,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "begin")
    assert without_docstring(quotes[0]) == without_docstring(ast.unparse(step))
