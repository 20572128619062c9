"""Sends the requests of a benchmark to an OpenAI server and times what comes back. Knows no figures."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagoda.bench.requests import SampleRequest
from pagoda.http.http_client import AsyncHttpClient
from pagoda_common.errors import PagodaError

ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
"""Paths by --backend."""


@dataclass(slots=True)
class RequestResult:
    """The result of one request; times in seconds, `start_s` and `end_s` from time.perf_counter()."""

    prompt_len: int
    start_s: float = 0.0
    end_s: float = 0.0
    """When its last token came."""
    ttft_s: float = 0.0
    """Time to first token."""
    itl_s: list[float] = field(default_factory=list)
    """Inter-token latencies, one per later event."""
    text: str = ""
    output_len: int = 0
    error: str = ""
    """Why it failed; empty when it did not."""

    @property
    def is_success(self) -> bool:
        """Whether all of the answer came."""
        return not self.error

    @property
    def latency_s(self) -> float:
        """From sending to the last token."""
        return self.end_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        return (self.latency_s - self.ttft_s) / (self.output_len - 1) if self.output_len > 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """How requests are sent."""

    backend: str
    """A key of ENDPOINTS."""
    model: str
    endpoint: str | None = None
    """Path in place of the backend's."""
    request_rate: float = float("inf")
    """Requests a second; inf sends all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the times between requests: 1 is a Poisson process, less is burstier."""
    max_concurrency: int | None = None
    """Most requests under way; None is no bound."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Further fields of the body."""

    @property
    def path(self) -> str:
        """Path of the endpoint."""
        return self.endpoint or ENDPOINTS[self.backend]

    def body(self, request: SampleRequest) -> dict[str, Any]:
        """The JSON that is sent."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.path.endswith("/chat/completions"):
            body["messages"] = [{"role": "user", "content": request.prompt}]
            body["max_completion_tokens"] = request.output_len
        else:
            body["prompt"] = request.prompt
            body["max_tokens"] = request.output_len
        return body | self.parameters


def send_times(num_requests: int, *, request_rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds after the start at which each request is due; the mean rate is met exactly over all of them."""
    if request_rate == float("inf"):
        yield from [0.0] * num_requests
        return
    draw = random.Random(seed)
    gaps = [draw.gammavariate(burstiness, 1 / (request_rate * burstiness)) for _ in range(num_requests)]
    scale = num_requests / request_rate / sum(gaps) if sum(gaps) else 1.0
    due_s = 0.0
    for gap in gaps:
        due_s += gap * scale
        yield due_s


async def send_all(
    client: AsyncHttpClient,
    requests: Sequence[SampleRequest],
    load: Load,
    *,
    seed: int,
    on_done: Callable[[RequestResult], None] = lambda result: None,
) -> tuple[list[RequestResult], float]:
    """Send `requests` at the load's rate.

    Returns:
        One result a request, in order, and the seconds from the first one sent to the last one's end.
    """
    slots = asyncio.Semaphore(load.max_concurrency or len(requests))
    start_s = time.perf_counter()

    async def work(request: SampleRequest) -> RequestResult:
        async with slots:
            result = await send_one(client, request, load)
        on_done(result)
        return result

    due = send_times(len(requests), request_rate=load.request_rate, burstiness=load.burstiness, seed=seed)
    async with asyncio.TaskGroup() as group:
        tasks = []
        for request, due_s in zip(requests, due, strict=True):
            await asyncio.sleep(max(0.0, start_s + due_s - time.perf_counter()))
            tasks.append(group.create_task(work(request)))
    return [task.result() for task in tasks], time.perf_counter() - start_s


async def send_one(client: AsyncHttpClient, request: SampleRequest, load: Load) -> RequestResult:
    """Send one request and time its events; what goes wrong is in the result."""
    result = RequestResult(prompt_len=request.prompt_len)
    texts: list[str] = []
    num_events = 0
    last_s = result.start_s = time.perf_counter()
    try:
        async for event in client.stream(load.path, load.body(request)):
            now_s = time.perf_counter()
            if usage := event.get("usage"):
                result.output_len = usage.get("completion_tokens") or 0
                result.prompt_len = usage.get("prompt_tokens") or result.prompt_len
            text = _text(event)
            if text is None:
                continue
            if num_events == 0:
                result.ttft_s = now_s - result.start_s
            else:
                result.itl_s.append(now_s - last_s)
            num_events += 1
            last_s = now_s
            texts.append(text)
    except PagodaError as error:
        result.error = error.message
    if not result.error and num_events == 0:
        result.error = "the answer has no token"
    result.text, result.end_s = "".join(texts), last_s
    result.output_len = result.output_len or num_events
    return result


def _text(event: dict[str, Any]) -> str | None:
    """The text of an event that brings a token; None for one that does not, such as a message's role or the usage."""
    if not event.get("choices"):
        return None
    choice = event["choices"][0]
    if "delta" not in choice:
        return choice.get("text") or ""
    delta = choice["delta"]
    text = delta.get("reasoning") or delta.get("reasoning_content") or delta.get("content")
    return text or ("" if delta.get("tool_calls") else None)
