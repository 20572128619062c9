"""``pagoda run-batch``: answers to a file in OpenAI's batch format, from a private stack or a running server."""

import argparse
import asyncio
import contextlib
import json
import os
import sys
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from pagoda.commands import serve
from pagoda.http.batch import BatchCounts, lines_of, run_batch
from pagoda.http.http_client import AsyncHttpClient
from pagoda.server.local_server import running_stack
from pagoda.server.local_stack import LocalStack
from pagoda_common.errors import PagodaError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Files, and who answers: --url, or a stack with the flags of `pagoda serve`."""
    group = parser.add_argument_group("batch")
    group.add_argument("-i", "--input-file", required=True, metavar="FILE", help="JSONL of requests")
    group.add_argument("-o", "--output-file", required=True, metavar="FILE", help="JSONL of results, in the same order")
    group.add_argument("--url", help="a running server, such as http://127.0.0.1:8000; without it one is started")
    group.add_argument(
        "--max-concurrency",
        type=int,
        default=256,
        metavar="N",
        help="maximum number of open requests (default: %(default)s)",
    )
    group.add_argument("--disable-tqdm", action="store_true", help="do not show progress")
    serve.add_arguments(parser)
    parser.set_defaults(port=0, grpc_port=0)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """0 when every line was a request, be its answer an error; 1 when one was none, or the model cannot be served."""
    if args.max_concurrency < 1:
        parser.error(f"--max-concurrency is {args.max_concurrency}, must be at least 1")
    source, target = Path(args.input_file), Path(args.output_file)
    if not source.is_file():
        parser.error(f"--input-file {source} is not a file")
    if target.exists() and target.samefile(source):
        parser.error("--output-file must not be the input file")
    if not target.parent.is_dir():
        parser.error(f"--output-file {target}: {target.parent} is not a directory")
    stack = None if args.url else serve.plan(args, parser).for_this_process()
    counts = asyncio.run(answer_file(args, stack, source, target))
    invalid = f", {counts.num_invalid} of them invalid lines" if counts.num_invalid else ""
    print(f"{counts.num_completed} answered, {counts.num_failed} failed{invalid}: {target}", file=sys.stderr)
    return 1 if counts.num_invalid else 0


async def answer_file(args: argparse.Namespace, stack: LocalStack | None, source: Path, target: Path) -> BatchCounts:
    """Write one result for each line of `source`, as soon as those before it are written."""
    counts = BatchCounts()
    key = next(iter(args.api_key if stack is None else stack.frontend.api_key), os.environ.get("OPENAI_API_KEY"))
    async with AsyncExitStack() as exits:
        url = args.url if stack is None else await exits.enter_async_context(running_stack(stack))
        url = url.rstrip("/").removesuffix("/v1")
        client = await exits.enter_async_context(AsyncHttpClient(base_url=url, api_key=key))
        await client.get("/v1/models")  # a server that is not there, or a wrong key, ends it before the first line
        lines = exits.enter_context(source.open("rb"))
        # Half of a surrogate pair, which JSON can hold and UTF-8 cannot, is written as JSON's escape.
        output = exits.enter_context(target.open("w", encoding="utf-8", errors="backslashreplace"))
        bar = exits.enter_context(tqdm(desc="Answered", unit=" requests", disable=args.disable_tqdm))
        results = run_batch(lines_of(lines), client, max_concurrency=args.max_concurrency, counts=counts)
        async with aclosing(results):
            async for result in results:
                _write(output, result, target)
                bar.update()
    return counts


def _write(output: TextIO, result: dict[str, Any], target: Path) -> None:
    """One line. Raises PagodaError when the disk is full, or for another reason does not take it."""
    try:
        output.write(json.dumps(result, ensure_ascii=False) + "\n")
        output.flush()
    except OSError as error:
        with contextlib.suppress(OSError):
            output.close()  # what it could not write is not written at the end either
        raise PagodaError(f"--output-file {target} cannot be written: {error.strerror}") from error
