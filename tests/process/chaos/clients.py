"""Many streaming HTTP clients at once, and how far they have got together."""

import asyncio
import json
import random
import time
from collections.abc import Sequence

import aiohttp

from tests.process.chaos.requests import ChaosRequest
from tests.process.transcript import Transcript

HANG_S = 240.0
"""A stream that takes longer is taken for a hang."""
LINE_BYTES = 1 << 20
EMBED_CALLS = 20
"""Of a client that asks for embeddings: together they take about as long as a stream."""
FIRST_WORDS_S = 0.3
"""Clients begin at random within so many seconds."""


class Progress:
    """Output tokens that all clients of a round have got; who waits for a number of them is woken."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._wanted = 0
        self._reached = asyncio.Event()

    def add(self, num_tokens: int) -> None:
        """So many more have come."""
        self.num_tokens += num_tokens
        if self.num_tokens >= self._wanted:
            self._reached.set()

    async def reach(self, num_tokens: int) -> None:
        """Return when so many have come."""
        self._wanted = num_tokens
        if self.num_tokens < num_tokens:
            self._reached.clear()
            await self._reached.wait()


async def stream(http: aiohttp.ClientSession, request: ChaosRequest, progress: Progress) -> Transcript:
    """Send one request and read its stream to the end; whatever goes wrong is a fault in the transcript."""
    transcript = Transcript(times=[time.monotonic()])
    if request.kind == "embed":
        return await embed(http, request, transcript)
    try:
        async with asyncio.timeout(HANG_S), http.post(request.path, json=request.body) as response:
            if response.status != 200:
                transcript.faults.append(f"status {response.status}: {await response.text()}")
                return transcript
            await read(response, transcript, progress)
    except TimeoutError:
        transcript.faults.append(f"no end within {HANG_S:g} s")
    except (aiohttp.ClientError, ValueError) as error:
        transcript.faults.append(f"a broken stream: {error!r}")
    return transcript


async def embed(http: aiohttp.ClientSession, request: ChaosRequest, transcript: Transcript) -> Transcript:
    """Send one request again and again, so that a fault hits one of them; each answer is a choice of the transcript."""
    try:
        async with asyncio.timeout(HANG_S):
            for number in range(EMBED_CALLS):
                async with http.post(request.path, json=request.body) as response:
                    if response.status != 200:
                        transcript.faults.append(f"status {response.status}: {await response.text()}")
                        return transcript
                    transcript.take_embeddings(number, await response.json())
                    transcript.times.append(time.monotonic())
    except TimeoutError:
        transcript.faults.append(f"no end within {HANG_S:g} s")
    except (aiohttp.ClientError, ValueError) as error:
        transcript.faults.append(f"a broken answer: {error!r}")
    transcript.is_done = True
    return transcript


async def read(response: aiohttp.ClientResponse, transcript: Transcript, progress: Progress) -> None:
    """Take a stream's events to its end."""
    async for line in response.content:
        if not line.startswith(b"data:"):  # a comment, an id, the end of an event
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            if transcript.is_done:
                transcript.faults.append("a second [DONE]")
            transcript.is_done = True
            continue
        transcript.times.append(time.monotonic())
        progress.add(transcript.take(json.loads(data)))


async def stream_all(
    url: str,
    requests: Sequence[ChaosRequest],
    progress: Progress,
    *,
    draw: random.Random,
    concurrency: int | None = None,
) -> list[Transcript]:
    """All requests, each by a client of its own; transcripts in the order of the requests.

    Args:
        concurrency: most clients at a time; None lets all begin within FIRST_WORDS_S.
    """
    places = asyncio.Semaphore(concurrency or len(requests))

    async def run(request: ChaosRequest, delay_s: float) -> Transcript:
        async with places:
            await asyncio.sleep(delay_s)
            return await stream(http, request, progress)

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout, read_bufsize=LINE_BYTES) as http:
        delays = [0.0 if concurrency else draw.uniform(0, FIRST_WORDS_S) for _ in requests]
        return await asyncio.gather(*map(run, requests, delays))
