"""What docs/grpc.md and examples/ show of gRPC in Python, against a frontend."""

import asyncio
import contextlib
import io
import re
from pathlib import Path

from examples import list_services
from pagoda.v1 import inference_pb2
from tests.service.frontend.harness import Running

PAGE = Path(__file__).parents[4] / "docs" / "grpc.md"


async def test_services_are_listed_by_reflection(frontend: Running) -> None:
    address = f"127.0.0.1:{frontend.server.grpc_port}"
    lines: list[str] = []
    async with asyncio.timeout(240):  # health follows a moment later
        while "pagoda.v1.Inference: SERVING" not in lines:
            lines = await asyncio.to_thread(lambda: list(list_services.lines(address)))
    start = lines.index("pagoda.v1.Inference: SERVING") + 1
    methods = inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods
    assert lines[start : start + len(methods)] == [f"  {list_services.signature(method)}" for method in methods]
    assert "  Generate(GenerateRequest) returns (stream GenerateResponse)" in lines
    assert "grpc.reflection.v1alpha.ServerReflection" in lines  # it has no health of its own


async def test_the_example_of_the_page_runs(frontend: Running) -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert "127.0.0.1:50051" in code
    code = code.replace("127.0.0.1:50051", f"127.0.0.1:{frontend.server.grpc_port}")
    printed = io.StringIO()

    def run() -> None:
        with contextlib.redirect_stdout(printed):
            exec(code, {})

    await asyncio.to_thread(run)
    text, failure, field = printed.getvalue().splitlines()
    assert text
    assert failure == "NOT_FOUND: The model `unknown` does not exist."
    assert field == "field: model"
