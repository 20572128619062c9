"""Attacks of every kind against a real stack, under another client's stream: no process dies, every answer is a refusal
or a result, and memory returns. `python -m tests.process.hostile.test_attacks` also looks at the stream's gap."""

import argparse
import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httpx
import pytest

from tests.process.hostile import (
    attack_bodies,
    attack_connections,
    attack_holding,
    attack_http2,
    attack_streams,
)
from tests.process.hostile.attack import HANG_S, MODEL, Attack, Outcome
from tests.process.hostile.fuzz_cases import FLAGS
from tests.process.hostile.test_growth import CACHE_BYTES, MAX_GAP_S, MAX_GROWTH_BYTES, Victim
from tests.process.stack import MODULES, Stack, ask, poll_until

ATTACKS = (
    *attack_bodies.ATTACKS,
    *attack_connections.ATTACKS,
    *attack_streams.ATTACKS,
    *attack_holding.ATTACKS,
    *attack_http2.ATTACKS,
)
SHORT = 0.02
"""Share of the traffic in the short form."""
MEMORY_S = 30.0
"""After which memory is back; told, and asserted in the long form alone."""
MAX_LINE_CHARS = 8192 + 200
"""Of a record, and what the services' names and times add."""


@dataclass(slots=True)
class Seen:
    """What one attack did."""

    outcome: Outcome = field(default_factory=Outcome)
    gap_s: float = 0.0
    duration_s: float = 0.0
    load: float = 0.0
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """Largest growth of each service."""

    def line(self, name: str) -> str:
        """For people."""
        grown = ", ".join(f"{service} +{size >> 20}" for service, size in self.peak_bytes.items())
        counts = dict(self.outcome.counts.most_common(8))
        told = f"gap {self.gap_s:5.2f} s, load {self.load:4.1f}, {self.duration_s:5.1f} s, MiB {grown}"
        return f"{name:34} {told}, {counts}"[:400]


def run_attack(stack: Stack, attack: Attack, victim: Victim, *, share: float) -> Seen:
    """Send one attack to a ready stack, and wait until memory is back."""
    seen = Seen()
    before = {name: stack.service(name) for name in MODULES}
    sizes = {name: process.memory_info().rss for name, process in before.items()}
    poll_until(lambda: victim.num_tokens, what="the victim streams")
    victim.longest_gap_s, started = 0.0, time.monotonic()
    seen.peak_bytes = dict.fromkeys(MODULES, 0)

    async def send() -> None:
        watching = asyncio.create_task(watch())
        try:
            await attack.send(stack, seen.outcome, share)
        finally:
            watching.cancel()

    async def watch() -> None:
        while True:
            for name, process in before.items():
                if process.is_running():
                    grown = process.memory_info().rss - sizes[name]
                    seen.peak_bytes[name] = max(seen.peak_bytes[name], grown)
            await asyncio.sleep(0.5)

    asyncio.run(send())
    seen.duration_s, seen.gap_s, seen.load = time.monotonic() - started, victim.longest_gap_s, os.getloadavg()[0]
    for name, process in before.items():
        if stack.service(name).pid != process.pid:
            seen.outcome.violations.append(f"{name} was replaced")
    return seen


def check_memory(stack: Stack, sizes: dict[str, int], *, timeout_s: float) -> None:
    """Wait until no service has more than it had and what is allowed."""
    for name, size in sizes.items():
        poll_until(
            lambda name=name, size=size: stack.service(name).memory_info().rss < size + MAX_GROWTH_BYTES,  # type: ignore[misc]
            what=f"{name} gives its memory back",
            timeout_s=timeout_s,
        )


def check_texts(stack: Stack) -> None:
    """What clients wrote is no label of a metric, and ends no line of a log."""
    metrics = httpx.get(f"{stack.url}/metrics", timeout=HANG_S).text
    for text in ("none-", "tenant-", "adapter-", "forged", "x" * 100):
        assert text not in metrics
    assert "Traceback" not in stack.log
    assert "\x1b" not in stack.log
    assert not [line for line in stack.log.split("\n") if line.startswith("ERROR") or len(line) > MAX_LINE_CHARS]


def make_stack() -> Stack:
    """One that is open to all, with all endpoints."""
    return Stack("--disable-uvicorn-access-log", f"--kv-cache-memory={CACHE_BYTES}", *FLAGS)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = make_stack()
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


def use(stack: Stack) -> None:
    """Ordinary requests of every kind, which fill the KV cache once and load what is loaded at its first use."""
    chat = {"messages": [{"role": "user", "content": "Tell me a story about a dog."}], "model": MODEL}
    text = {"prompt": "Once upon a time " * 20, "model": MODEL}
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {**chat, "max_tokens": 200, "n": 8, "logprobs": True, "top_logprobs": 20}),
        ("/v1/completions", {**text, "max_tokens": 100, "n": 4, "use_beam_search": True}),
        ("/v1/completions", {**text, "max_tokens": 100, "prompt_logprobs": 20}),
        ("/v1/chat/completions", {**chat, "structured_outputs": {"json": schema}}),
        ("/v1/chat/completions", {**chat, "structured_outputs": {"regex": "[a-z]{1,40}"}}),
        ("/v1/embeddings", {"model": MODEL, "input": ["Once upon a time " * 20] * 64}),
    ]
    with ThreadPoolExecutor(max_workers=18) as pool:
        posts = [pool.submit(httpx.post, stack.url + path, json=body, timeout=HANG_S) for path, body in calls * 3]
    for answer in posts:
        assert answer.result().status_code == HTTPStatus.OK, answer.result().text


@pytest.fixture(scope="module")
def sizes(stack: Stack) -> dict[str, int]:
    use(stack)
    return {name: stack.service(name).memory_info().rss for name in MODULES}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_harms_no_one(stack: Stack, attack: Attack, sizes: dict[str, int]) -> None:
    expected = ask(stack.url)
    victim = Victim(stack, has_key=False)
    try:
        seen = run_attack(stack, attack, victim, share=SHORT)
    finally:
        victim.end()
    print(seen.line(attack.name))
    assert not [*seen.outcome.violations, *victim.errors], "\n".join([*seen.outcome.violations[:20], *victim.errors])
    assert victim.num_tokens
    assert seen.outcome.counts
    assert ask(stack.url) == expected
    check_memory(stack, sizes, timeout_s=HANG_S)
    check_texts(stack)


def run_all(attacks: Sequence[Attack], *, share: float) -> list[str]:
    """The long form; its violations."""
    stack = make_stack()
    violations = []
    try:
        stack.wait_ready()
        expected = ask(stack.url)
        use(stack)
        sizes = {name: stack.service(name).memory_info().rss for name in MODULES}
        for attack in attacks:
            victim = Victim(stack, has_key=False)
            try:
                seen = run_attack(stack, attack, victim, share=share)
            finally:
                victim.end()
            print(seen.line(attack.name), flush=True)
            found = [*seen.outcome.violations, *victim.errors]
            if seen.gap_s > MAX_GAP_S:
                found.append(f"the victim waited {seen.gap_s:.2f} s, at most {MAX_GAP_S:g} s are allowed")
            if ask(stack.url) != expected:
                found.append("a greedy answer has changed")
            try:
                check_memory(stack, sizes, timeout_s=MEMORY_S)
            except AssertionError:
                grown = {name: (stack.service(name).memory_info().rss - size) >> 20 for name, size in sizes.items()}
                found.append(f"memory is not back: {grown} MiB")
            for each in dict.fromkeys(found):
                print("   ", each[:600], flush=True)
            violations += [f"{attack.name}: {each}" for each in found]
        if "Traceback" in stack.log:
            violations.append(stack.log[stack.log.index("Traceback") :][:9000])
    finally:
        stack.end()
    return violations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="attacks whose name has this in it")
    parser.add_argument("--share", type=float, default=1.0, help="of the traffic")
    args = parser.parse_args()
    violations = run_all([attack for attack in ATTACKS if args.only in attack.name], share=args.share)
    print("\n".join(violations[-1:]), f"{len(violations)} violations", sep="\n")
    raise SystemExit(1 if violations else 0)


if __name__ == "__main__":
    main()
