"""The loop of an engine's own process: commands come as JSON lines on stdin, figures go back on stdout.

Runs in the engine's virtual environment: standard library only. Whatever the engine prints goes to stderr.
"""

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any, Protocol


class Engine(Protocol):
    """What an adapter gives. Every prompt is a list of token ids; greedy, the end of sequence is ignored."""

    def prepare(self, *, num_parallel: int, max_len: int) -> None:
        """Get ready, untimed, for `num_parallel` requests at a time of at most `max_len` tokens each."""

    def stream(self, prompt: list[int], num_outputs: int) -> list[float]:
        """Continue one prompt; time.perf_counter() when each token came."""

    def generate(self, prompts: list[list[int]], num_outputs: int, concurrency: int) -> int:
        """Continue all prompts, at most `concurrency` at a time (0: all); the number of tokens generated."""

    def close(self) -> None:
        """End what was started."""


def main(open_engine: Callable[[argparse.Namespace], Engine], packages: Sequence[str]) -> None:
    """Load the engine, say that it is ready with the versions of `packages`, and answer commands until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="directory or file that this engine reads")
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--options", type=json.loads, default={}, help="JSON object of the engine's own options")
    args = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    started = time.perf_counter()
    engine = open_engine(args)
    try:
        _send(replies, {"versions": versions(packages), "load_s": time.perf_counter() - started})
        for line in sys.stdin:
            _send(replies, _answer(engine, json.loads(line)))
    finally:
        engine.close()


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions; a package that is not there is left out."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _send(replies: Any, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _answer(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    try:
        return _measure(engine, **command)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def gaps(times: list[float]) -> list[float]:
    """Seconds between tokens that came at `times`; tokens that came together share the time since those before."""
    found: list[float] = []
    counts = Counter(times)
    for before, after in pairwise(sorted(counts)):
        found += [(after - before) / counts[after]] * counts[after]
    return found or [0.0]


def _measure(
    engine: Engine, *, prompts: list[list[int]], num_outputs: int, concurrency: int, is_stream: bool, max_len: int
) -> dict[str, Any]:
    engine.prepare(num_parallel=concurrency or len(prompts), max_len=max_len)
    started = time.perf_counter()
    if is_stream:
        times = engine.stream(prompts[0], num_outputs)
        seconds = time.perf_counter() - started
        reply: dict[str, Any] = {"seconds": seconds, "num_tokens": len(times)}
        if len(times) > 1:
            reply |= {"gap_s": statistics.median(gaps(times)), "ttft_s": times[0] - started}
        return reply
    num_tokens = engine.generate(prompts, num_outputs, concurrency)
    return {"seconds": time.perf_counter() - started, "num_tokens": num_tokens}
