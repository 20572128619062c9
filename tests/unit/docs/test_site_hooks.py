"""The hooks of the documentation site: links lead to pages of the site, or name a file."""

from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

HOOKS: dict[str, Any] = run_path(str(Path(__file__).parents[3] / "scripts" / "docs_hooks.py"))


@pytest.mark.parametrize(
    ("page", "text", "shown"),
    [
        ("grpc.md", "[a stream\nof events](../examples/a.py)", "a stream\nof events (`examples/a.py`)"),
        ("grpc.md", "[tests/compat](../tests/compat)", "`tests/compat`"),
        ("grpc.md", "[GPU](gpu.md#a-step), [net](https://a.b/c.md)", "[GPU](gpu.md#a-step), [net](https://a.b/c.md)"),
        ("grpc.md", "[`how`](../CONTRIBUTING.md#add-a-model)", "[`how`](contributing.md#add-a-model)"),
        ("changelog.md", "[how](docs/gpu.md#a-step)", "[how](gpu.md#a-step)"),
        ("results.md", "[CPU](../../docs/cpu.md), [page](services.md)", "[CPU](cpu.md), [page](results_services.md)"),
        ("clients.md", "[openai_client.py](openai_client.py)", "`examples/clients/openai_client.py`"),
        ("grpc.md", "```\n[a](../b.py)\n```\n[a](../b.py)", "```\n[a](../b.py)\n```\na (`b.py`)"),
    ],
)
def test_a_link_holds_on_the_site(page: str, text: str, shown: str) -> None:
    assert HOOKS["with_site_links"](text, page) == shown


def test_every_copied_page_is_there() -> None:
    assert [path for path in HOOKS["PAGES"] if not (HOOKS["ROOT"] / path).is_file()] == []
