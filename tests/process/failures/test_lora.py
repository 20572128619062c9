"""Streams of several LoRA adapters survive kills token for token; adapters come, go and change while they run."""

import concurrent.futures
import http.client
import json
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.peft_adapters import make_adapter
from tests.process.stack import Stack

NUM_TOKENS = 250
NAMES = ("tiny", "a0", "a1", "a2", "a3", "a4", "a5")
"""The model itself and six adapters, of which four may run in a step."""
PROMPT = [7, 9, 11] * 20


class LoraStack(Stack):
    """A stack whose adapters lie below a folder."""

    root: Path

    def kill(self, name: str) -> None:
        """End a process without a word."""
        self.service(name).send_signal(signal.SIGKILL)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoraStack]:
    root = tmp_path_factory.mktemp("lora")
    model = make_checkpoint("LlamaForCausalLM", root / "model")
    adapters = {
        name: make_adapter(model, root / name, seed=seed, r=2 << seed % 4, target_modules="all-linear")
        for seed, name in enumerate([*NAMES[1:], "new", "newer"])
    }
    shutil.copytree(adapters["new"], root / "found" / "by-name")
    given = [f"{name}={adapters[name]}" for name in NAMES[1:]]
    options = ("--dtype=float32", "--kv-cache-memory=64M", "--enable-lora", "--max-loras=4", "--max-cpu-loras=5")
    options += ("--enable-runtime-lora-updating", f"--allowed-weights={root}", f"--lora-resolver-dir={root / 'found'}")
    stack = LoraStack(str(model), "--served-model-name=tiny", *options, "--lora-modules", *given)
    stack.root = root
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


def post(stack: LoraStack, path: str, body: dict[str, Any]) -> Any:
    """The answer: JSON, or text."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{stack.url}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=240) as response:
        text = response.read().decode()
    return json.loads(text) if text.startswith("{") else text


def tokens_of(stack: LoraStack, name: str, **more: Any) -> list[int]:
    body = {"model": name, "prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, "temperature": 0}
    answer = post(stack, "/v1/completions", {**body, "return_token_ids": True, **more})
    return list(answer["choices"][0]["token_ids"])


class Streams:
    """A stream of each name, greedy or seeded in turn."""

    def __init__(self, stack: LoraStack, names: tuple[str, ...] = NAMES, *, resumes: bool = False) -> None:
        """`resumes`: a stream that breaks is asked for again, from where it was."""
        self.tokens: list[list[int]] = [[] for _ in names]
        self.num_resumed = 0
        self._resumes = resumes
        self._errors: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._follow, args=(stack, number, name)) for number, name in enumerate(names)
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, stack: LoraStack, number: int, name: str) -> None:
        body = {"model": name, "prompt": PROMPT, "stream": True, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        body |= {"temperature": float(number % 2), "seed": 5, "return_token_ids": True}
        headers = {"Content-Type": "application/json"}
        try:
            while not self._read(f"{stack.url}/v1/completions", json.dumps(body).encode(), headers, number):
                self.num_resumed += 1
                stack.wait_ready()
        except Exception as error:
            self._errors.append(error)

    def _read(self, url: str, body: bytes, headers: dict[str, str], number: int) -> bool:
        """Read a stream, from after the event that the headers name; False: its connection broke."""
        event_id = ""
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=300) as response:
                for line in response:
                    if line.startswith(b"id: "):
                        event_id = line[4:].decode().strip()
                    elif line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        assert "error" not in event, event
                        for choice in event["choices"]:
                            self.tokens[number] += choice["token_ids"] or []
                        headers["Last-Event-ID"] = event_id
                    elif line.startswith(b"data: [DONE]"):
                        return True
        except (OSError, http.client.HTTPException) as error:
            is_refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if not self._resumes or is_refused:
                raise
        return False

    def wait_for_some(self, num_streams: int, timeout_s: float = 240) -> None:
        """Return when so many streams have some tokens."""
        deadline = time.monotonic() + timeout_s
        while sum(len(tokens) > 20 for tokens in self.tokens) < num_streams and not self._errors:
            assert time.monotonic() < deadline, f"{list(map(len, self.tokens))} tokens in {timeout_s:g} s"
            time.sleep(0.005)

    def finish(self) -> list[list[int]]:
        for thread in self._threads:
            thread.join(timeout=300)
        assert not self._errors, self._errors
        return self.tokens


@pytest.fixture(scope="module")
def expected(stack: LoraStack) -> list[list[int]]:
    alone = [Streams(stack, (name,)).finish()[0] for name in NAMES[:1]]
    each = []
    for number, name in enumerate(NAMES):
        body = {"model": name, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        body |= {"temperature": float(number % 2), "seed": 5, "return_token_ids": True}
        each.append(list(post(stack, "/v1/completions", body)["choices"][0]["token_ids"]))
    assert each[0] == alone[0]
    assert all(len(tokens) == NUM_TOKENS for tokens in each)
    assert len({tuple(tokens) for tokens in each}) == len(NAMES), "an adapter changes nothing"
    return each


def test_many_adapters_at_once_are_as_each_alone(stack: LoraStack, expected: list[list[int]]) -> None:
    assert Streams(stack).finish() == expected


@pytest.mark.parametrize("service", ["worker", "scheduler"])
def test_streams_of_six_adapters_outlive_a_killed_process(
    stack: LoraStack, expected: list[list[int]], service: str
) -> None:
    streams = Streams(stack)
    streams.wait_for_some(3)
    stack.kill(service)
    assert streams.finish() == expected


def test_streams_of_six_adapters_are_resumed_at_another_frontend(stack: LoraStack, expected: list[list[int]]) -> None:
    streams = Streams(stack, resumes=True)
    streams.wait_for_some(3)
    stack.kill("frontend")
    assert streams.finish() == expected
    assert streams.num_resumed > 0


def test_models_lists_adapters_with_their_parent(stack: LoraStack) -> None:
    cards = {card["id"]: card for card in httpx.get(f"{stack.url}/v1/models", timeout=60).json()["data"]}
    assert cards["a0"]["parent"] == "tiny"
    assert cards["a0"]["root"] == str(stack.root / "a0")
    assert cards["tiny"]["parent"] is None


def test_an_adapter_is_found_by_its_name(stack: LoraStack) -> None:
    assert len(tokens_of(stack, "by-name")) == 24
    with pytest.raises(urllib.error.HTTPError, match="404"):
        tokens_of(stack, "nothing-like-that")


def test_an_adapter_comes_changes_and_goes(stack: LoraStack) -> None:
    root = stack.root
    body = {"lora_name": "live", "lora_path": str(root / "new")}
    post(stack, "/v1/load_lora_adapter", body)
    first = tokens_of(stack, "live", max_tokens=200)
    with pytest.raises(urllib.error.HTTPError, match="400"):
        post(stack, "/v1/load_lora_adapter", body)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = [pool.submit(tokens_of, stack, "live", max_tokens=200) for _ in range(3)]
        time.sleep(0.1)
        post(stack, "/v1/load_lora_adapter", {**body, "lora_path": str(root / "newer"), "load_inplace": True})
        second = tokens_of(stack, "live", max_tokens=200)
        assert second != first
        assert all(one.result() in (first, second) for one in running)
    post(stack, "/v1/unload_lora_adapter", {"lora_name": "live"})
    with pytest.raises(urllib.error.HTTPError, match="404"):
        tokens_of(stack, "live")


def test_an_adapter_that_cannot_be_read_is_refused_and_hurts_no_one(
    stack: LoraStack, expected: list[list[int]]
) -> None:
    root: Path = stack.root
    (root / "bad").mkdir()
    (root / "bad" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    streams = Streams(stack, NAMES[:3])
    with pytest.raises(urllib.error.HTTPError) as failed:
        post(stack, "/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": str(root / "bad")})
    assert "has no adapter_model.safetensors" in failed.value.read().decode()
    assert streams.finish() == expected[:3]


def test_the_list_outlives_a_scheduler(stack: LoraStack) -> None:
    post(stack, "/v1/load_lora_adapter", {"lora_name": "kept", "lora_path": str(stack.root / "new")})
    before = tokens_of(stack, "kept")
    stack.kill("scheduler")
    assert tokens_of(stack, "kept") == before
