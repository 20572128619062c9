"""Grown requests against a real stack, under another client's stream: of anyone where there are no keys, of another
tenant and of someone without a key where there are. `python -m tests.process.hostile.test_growth` is the long form."""

import argparse
import asyncio
import collections
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import httpx
import pytest

from pagoda_common.grammar.matcher import MAX_FORCED_BYTES
from tests.process.hostile.growth import Grown, grown_case
from tests.process.stack import MODULES, Stack, poll_until

NUM_REQUESTS = 300
NUM_KEYED_REQUESTS = 120
SEED = 37
CONCURRENCY = 4
HANG_S = 240.0
MAX_GAP_S = 1.0
"""Of the victim's stream, on two cores that do nothing else; told, and asserted in the long form alone."""
MAX_GROWTH_BYTES = 100 * 1024**2
CACHE_BYTES = 32 * 1024**2
"""Of the KV cache: so much more of the worker may be resident, for it keeps the blocks that it has touched."""
MIN_TAKEN_BYTES = 16 * 1024**2
"""By regular expressions that force as much text as they may."""
VICTIM_KEY, ATTACKER_KEY = "key-of-the-victim", "key-of-the-attacker"
NO_KEY_SHARE = 4
"""With keys: one request of so many has none."""
REFUSALS = ("UNAUTHENTICATED", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "UNAVAILABLE")


class Victim:
    """A client that streams all the while, from a thread of its own."""

    def __init__(self, stack: Stack, *, has_key: bool) -> None:
        self._headers = bearer(VICTIM_KEY) if has_key else {}
        self.longest_gap_s = 0.0
        self.errors: list[str] = []
        self.num_tokens = 0
        self._url = f"{stack.url}/v1/completions"
        self._is_over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        body = {"prompt": "Once upon", "max_tokens": 900, "ignore_eos": True, "temperature": 0, "stream": True}
        while not self._is_over:
            try:
                with httpx.stream("POST", self._url, json=body, headers=self._headers, timeout=HANG_S) as response:
                    self._read(response)
            except (httpx.HTTPError, AssertionError) as error:
                self.errors.append(repr(error))

    def _read(self, response: httpx.Response) -> None:
        assert response.status_code == 200, response.status_code
        last_s, last = time.monotonic(), ""
        for line in response.iter_lines():
            if not line.startswith("data:"):
                continue
            now_s, last = time.monotonic(), line
            if self.num_tokens:
                self.longest_gap_s = max(self.longest_gap_s, now_s - last_s)
            self.num_tokens, last_s = self.num_tokens + 1, now_s
            if self._is_over:
                return
        assert last == "data: [DONE]", last

    def end(self) -> None:
        """Stop it."""
        self._is_over = True
        self._thread.join()


@dataclass(slots=True)
class Report:
    """What a run has seen."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    violations: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes of each service before, and right after."""

    def text(self) -> str:
        """For people."""
        sizes = ", ".join(f"{name} {old / 2**20:.0f} to {new / 2**20:.0f}" for name, (old, new) in self.memory.items())
        return f"{dict(sorted(self.counts.items()))} longest gap {self.longest_gap_s:.2f} s; MiB: {sizes}"


def bearer(key: str) -> dict[str, str]:
    """Headers, and metadata."""
    return {"authorization": f"Bearer {key}"}


def send_all(stack: Stack, *, num_requests: int, seed: int, has_keys: bool = False) -> Report:
    """Send grown requests to a ready stack, and look at what is left of it."""
    report = Report()
    before = {name: (stack.service(name).pid, stack.service(name).memory_info().rss) for name in MODULES}
    victim = Victim(stack, has_key=has_keys)
    try:
        asyncio.run(_send(stack, report, num_requests=num_requests, seed=seed, has_keys=has_keys))
    finally:
        victim.end()
    report.memory = {name: (size, stack.service(name).memory_info().rss) for name, (pid, size) in before.items()}
    report.longest_gap_s = victim.longest_gap_s
    report.violations += victim.errors
    if not victim.num_tokens:
        report.violations.append("the victim got nothing")
    for name, (pid, size) in before.items():
        if stack.service(name).pid != pid:
            report.violations.append(f"{name} was replaced")
            continue
        poll_until(
            lambda name=name, size=size: stack.service(name).memory_info().rss < size + MAX_GROWTH_BYTES,  # type: ignore[misc]
            what=f"{name} gives its memory back",
            timeout_s=HANG_S,
        )
    return report


async def _send(stack: Stack, report: Report, *, num_requests: int, seed: int, has_keys: bool) -> None:
    left = iter(range(num_requests))
    async with (
        httpx.AsyncClient(base_url=stack.url, timeout=HANG_S) as http,
        grpc.aio.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel,
    ):

        async def work() -> None:
            for number in left:
                case = await asyncio.to_thread(grown_case, seed, number)
                shown = bearer(ATTACKER_KEY) if has_keys and number % NO_KEY_SHARE else {}
                outcome = await (_call(channel, case, shown) if case.is_grpc else _post(http, case, shown))
                report.counts[outcome] += 1
                if outcome.startswith("wrong"):
                    report.violations.append(f"{number}: {case.name}: {outcome}")

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(work())


async def _post(http: httpx.AsyncClient, case: Grown, shown: dict[str, str]) -> str:
    try:
        async with http.stream(
            "POST", case.path, content=case.content, headers={"Content-Type": "application/json", **shown}
        ) as response:
            content = await response.aread()
    except httpx.HTTPError as error:
        return f"wrong: {error!r}"
    status = response.status_code
    if status == 200:
        return "200"
    if status == 401 and json.loads(content) == {"error": "Unauthorized"}:  # as vLLM says it
        return "401"
    if status == 503 and "retry-after" not in response.headers:
        return "wrong: 503 without Retry-After"
    if not (400 <= status < 500 or status in (501, 503)) or not _is_error(content):
        return f"wrong: {status} {content[:300]!r}"
    return str(status)


def _is_error(content: bytes) -> bool:
    try:
        return bool(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return False


async def _call(channel: grpc.aio.Channel, case: Grown, shown: dict[str, str]) -> str:
    call: Any = channel.unary_unary(f"/pagoda.v1.Inference/{case.path}", bytes, bytes)
    try:
        await call(case.content, timeout=HANG_S, metadata=tuple(shown.items()))
    except grpc.aio.AioRpcError as error:
        name = error.code().name
        return f"gRPC {name}" if name in REFUSALS else f"wrong: gRPC {name} {(error.details() or '')[:300]}"
    return "gRPC OK"


def make_stack(*, has_keys: bool) -> Stack:
    """One with the keys of two tenants, or open to all."""
    with pytest.MonkeyPatch.context() as patch:
        if has_keys:
            patch.setenv("PAGODA_API_KEY", f"{VICTIM_KEY},{ATTACKER_KEY}")
        return Stack("--disable-uvicorn-access-log", f"--kv-cache-memory={CACHE_BYTES}")


@pytest.fixture(scope="module", params=[False, True], ids=["open", "keys"])
def has_keys(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def stack(has_keys: bool) -> Iterator[Stack]:
    stack = make_stack(has_keys=has_keys)
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


@pytest.mark.parametrize("has_keys", [False], ids=["open"], indirect=True)
def test_the_worker_gives_back_what_constraints_have_taken(stack: Stack) -> None:
    def answer(regex: str) -> int:
        body = {"prompt": "Once", "max_tokens": 2, "structured_outputs": {"regex": regex}}
        return httpx.post(f"{stack.url}/v1/completions", json=body, timeout=HANG_S).status_code

    for length in range(20, 24):  # from here on the process has all that it needs
        assert answer("b" * length) == 200
    worker = stack.service("worker")
    before = worker.memory_info().rss
    assert [answer(regex) for regex in ("c" * 50_000, "d{50000}", "[ef]g{50000}", "h{1000000}")] == [400] * 4
    for letter in "ijklmnopqrstuvwx":
        assert answer(letter * MAX_FORCED_BYTES) == 200
    taken = worker.memory_info().rss - before
    assert taken > MIN_TAKEN_BYTES
    poll_until(lambda: worker.memory_info().rss < before + taken // 2, what="half is given back", timeout_s=HANG_S)


def test_grown_requests_harm_no_one(stack: Stack, has_keys: bool) -> None:
    num_requests = NUM_KEYED_REQUESTS if has_keys else NUM_REQUESTS
    report = send_all(stack, num_requests=num_requests, seed=SEED, has_keys=has_keys)
    print(report.text())
    assert not report.violations, "\n".join(report.violations[:20])
    assert sum(report.counts.values()) == num_requests
    assert report.counts["400"] > num_requests // 10, report.counts
    assert report.counts["200"] > num_requests // 50, report.counts
    refused = report.counts["401"] + report.counts["gRPC UNAUTHENTICATED"]
    assert (refused > num_requests // (2 * NO_KEY_SHARE)) == has_keys, report.counts
    assert "Traceback" not in stack.log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keys", action="store_true", help="the victim, and three of four requests, have keys")
    args = parser.parse_args()
    stack = make_stack(has_keys=args.keys)
    try:
        stack.wait_ready()
        report = send_all(stack, num_requests=args.requests, seed=args.seed, has_keys=args.keys)
        if "Traceback" in stack.log:
            report.violations.append(stack.log[stack.log.index("Traceback") :][:3000])
    finally:
        stack.end()
    print(report.text())
    if report.longest_gap_s > MAX_GAP_S:
        report.violations.append(f"the victim waited {report.longest_gap_s:.2f} s, at most {MAX_GAP_S:g} s are allowed")
    print("\n".join(report.violations[:50]), f"{len(report.violations)} violations", sep="\n")
    raise SystemExit(1 if report.violations else 0)


if __name__ == "__main__":
    main()
