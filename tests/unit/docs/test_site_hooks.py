"""The hooks of the documentation site: what leads out of docs/ is plain text there."""

import importlib.util
from pathlib import Path

HOOKS = Path(__file__).parents[3] / "scripts" / "docs_hooks.py"


def test_a_link_out_of_the_site_is_plain_text_also_over_two_lines() -> None:
    spec = importlib.util.spec_from_file_location("docs_hooks", HOOKS)
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    text = "See [a stream\nof events](../examples/a.py), [GPU](gpu.md#a-step) and [its kernels](../kernels/README.md)."
    assert hooks.on_page_markdown(text) == "See a stream\nof events, [GPU](gpu.md#a-step) and its kernels."
