"""The frontend of a stream dies: the client resumes it at another one, and nothing is missing or repeated."""

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any

import pytest

from examples.resume_grpc import responses
from pagoda import LLM, AsyncLLM, SamplingParams
from pagoda.v1 import inference_pb2, types_pb2
from pagoda_common.process.children import free_port
from tests.process.stack import Stack

NUM_TOKENS = 400
SCHEDULER_PORT = free_port()
MESSAGES = [{"role": "user", "content": "Tell me a story about a dog."}]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack(f"--scheduler-port={SCHEDULER_PORT}")
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


class Reader:
    """A client that reads a stream, and notes the ids of its events."""

    def __init__(self, stack: Stack, path: str, body: dict[str, Any]) -> None:
        self._url = f"{stack.url}{path}"
        self._body = json.dumps({**body, "stream": True, "max_tokens": NUM_TOKENS, "ignore_eos": True}).encode()
        self.last_id = ""
        self.chunks: list[dict[str, Any]] = []
        self.is_done = False

    def read(self, *, until: int | None = None) -> None:
        """Read on, to the end or until that many chunks are there; a broken connection ends it too."""
        headers = {"Content-Type": "application/json"}
        if self.last_id:
            headers["Last-Event-ID"] = self.last_id
        request = urllib.request.Request(self._url, self._body, headers)
        with urllib.request.urlopen(request, timeout=300) as response:
            event_id = ""
            while line := response.readline():
                if line.startswith(b"id: "):
                    event_id = line[4:].decode().strip()
                elif line.startswith(b"data: [DONE]"):
                    self.is_done = True
                elif line.startswith(b"data: "):
                    self.chunks.append(json.loads(line[6:]))
                    self.last_id = event_id or self.last_id
                    event_id = ""
                if until is not None and len(self.chunks) >= until:
                    self.on_reached()
                    until = None

    def on_reached(self) -> None:
        """Called once, in the middle."""

    def texts(self) -> dict[int, str]:
        """The text of each choice."""
        texts: dict[int, str] = {}
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                texts[choice["index"]] = texts.get(choice["index"], "") + text
        return texts

    def logprobs(self) -> list[Any]:
        """Tokens and log probabilities of choice 0, rounded."""
        found = []
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                if choice["index"] == 0 and choice.get("logprobs"):
                    found += [(entry["token"], round(entry["logprob"], 4)) for entry in choice["logprobs"]["content"]]
        return found

    def ends(self) -> list[tuple[int, str]]:
        """(choice, finish_reason) of every chunk that has one."""
        return [
            (choice["index"], choice["finish_reason"])
            for chunk in self.chunks
            for choice in chunk["choices"]
            if choice["finish_reason"]
        ]


CUT: list[str] = []
"""Streams that were cut in the middle."""
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy chat": ("/v1/chat/completions", {"messages": MESSAGES, "temperature": 0}),
    "two choices": ("/v1/chat/completions", {"messages": MESSAGES, "temperature": 1, "seed": 5, "n": 2}),
    "logprobs": ("/v1/chat/completions", {"messages": MESSAGES, "seed": 6, "logprobs": True, "top_logprobs": 2}),
    "stop string": ("/v1/completions", {"prompt": "Once upon a time", "temperature": 0, "stop": ["zzzz", ". The"]}),
    "usage": (
        "/v1/completions",
        {"prompt": "Once upon a time", "seed": 7, "stream_options": {"include_usage": True}},
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_stream_goes_on_after_the_loss_of_its_frontend(stack: Stack, name: str) -> None:
    path, body = BODIES[name]
    undisturbed = Reader(stack, path, body)
    undisturbed.read()
    assert undisturbed.is_done
    reader = Reader(stack, path, body)
    reader.on_reached = stack.service("frontend").kill  # type: ignore[method-assign]
    with contextlib.suppress(OSError, HTTPException):  # the connection breaks
        reader.read(until=max(2, len(undisturbed.chunks) // 4))
    stack.wait_ready()
    if not reader.is_done:
        CUT.append(name)
        reader.read()
    assert reader.is_done
    assert reader.texts() == undisturbed.texts()
    assert sorted(reader.ends()) == sorted(undisturbed.ends())
    assert reader.logprobs() == undisturbed.logprobs()
    assert [chunk["usage"] for chunk in reader.chunks if chunk.get("usage")] == [
        chunk["usage"] for chunk in undisturbed.chunks if chunk.get("usage")
    ]
    assert len({(chunk["id"], chunk["created"]) for chunk in reader.chunks}) == 1


def chat_over_grpc(stack: Stack, *, kill_at: int | None = None) -> tuple[list[str], list[list[int]]]:
    """Texts and tokens of two choices, by the example; its frontend is killed when choice 0 has `kill_at` tokens."""
    request = inference_pb2.ChatRequest(
        messages=[inference_pb2.ChatMessage(role="user", content=MESSAGES[0]["content"])],
        sampling_params=types_pb2.SamplingParams(n=2, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True),
    )
    texts = ["", ""]
    tokens: list[list[int]] = [[], []]
    for response in responses([f"127.0.0.1:{stack.grpc_port}"], request):
        if response.token_ids:
            assert response.offset == len(tokens[response.index])
        texts[response.index] += response.content
        tokens[response.index] += response.token_ids
        if kill_at is not None and len(tokens[0]) >= kill_at:
            stack.service("frontend").kill()
            kill_at = None
            if len(tokens[0]) < NUM_TOKENS:
                CUT.append("grpc")
    return texts, tokens


def test_a_stream_over_grpc_goes_on_after_the_loss_of_its_frontend(stack: Stack) -> None:
    undisturbed = chat_over_grpc(stack)
    assert list(map(len, undisturbed[1])) == [NUM_TOKENS] * 2
    assert chat_over_grpc(stack, kill_at=NUM_TOKENS // 4) == undisturbed


async def test_the_library_goes_on_after_the_loss_of_the_scheduler(stack: Stack) -> None:
    stack.wait_ready()
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    unused = free_port()
    async with AsyncLLM(address=f"127.0.0.1:{unused},127.0.0.1:{SCHEDULER_PORT}") as llm:
        [undisturbed] = [output async for output in llm.generate("Once", params) if output.finished]
        has_killed = False
        async for output in llm.generate("Once", params):
            if not has_killed and len(output.outputs[0].token_ids) >= NUM_TOKENS // 4:
                assert not output.finished
                stack.service("scheduler").kill()
                has_killed = True
        assert output.outputs == undisturbed.outputs
        assert llm.engine.num_losses == 1
    with LLM(address=f"127.0.0.1:{SCHEDULER_PORT}") as blocking:
        [output] = blocking.generate("Once", params, use_tqdm=False)
        assert output.outputs == undisturbed.outputs


def test_streams_were_cut() -> None:
    assert CUT, "every stream had ended before its frontend was killed"


@pytest.mark.parametrize(
    ("event_id", "status"), [("nonsense", 400), ("chatcmpl-unknown:5", 404), ("x" * 600 + ":1", 400), ("a:1f,2", 404)]
)
def test_ids_that_lead_nowhere(stack: Stack, event_id: str, status: int) -> None:
    reader = Reader(stack, "/v1/chat/completions", {"messages": MESSAGES})
    reader.last_id = event_id
    with pytest.raises(urllib.error.HTTPError) as caught:
        reader.read()
    assert caught.value.code == status
    error = json.load(caught.value)["error"]
    assert error["param"] in ("Last-Event-ID", "resume_key")
