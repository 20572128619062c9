"""An LLM without an engine: a script says what each request gets."""

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from pagoda import LLM, AsyncLLM
from pagoda.llm.metrics import GenerationCounts
from pagoda.llm.prompts import Prompt
from pagoda.v1 import types_pb2
from pagoda_common.engine.stream import EngineRequest
from pagoda_common.params.outputs import SequenceDelta, TokenLogprobs
from pagoda_common.text.tokenizer import Tokenizer

INFO = types_pb2.ModelInfo(model="m", vocab_size=3072, max_model_len=40, generation_config_json='{"top_k": 9}')


class Loop:
    """Runs what it is given, in an event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, call: Any) -> Any:
        return self._loop.run_until_complete(call)

    def close(self) -> None:
        self._loop.close()


class Stream:
    """Gives its deltas, one list a time, or fails."""

    def __init__(self, request: EngineRequest, deltas: list[Any]) -> None:
        self.request, self._deltas = request, list(deltas)
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.at_least: list[int] = []
        self.num_closed = 0

    @property
    def is_finished(self) -> bool:
        return not self._deltas

    async def get(self, *, at_least: int = 1) -> list[SequenceDelta]:
        self.at_least.append(at_least)
        await asyncio.sleep(0)
        found = self._deltas.pop(0)
        if isinstance(found, Exception):
            raise found
        self.prompt_logprobs = [None]
        return cast("list[SequenceDelta]", found)

    def close(self) -> None:
        self.num_closed += 1


def delta(text: str, *, reason: Any = None, token_id: int = 7) -> list[SequenceDelta]:
    return [SequenceDelta(index=0, text=text, token_ids=[token_id], offset=0, finish_reason=reason)]


class Harness:
    """An LLM without an engine; `script` says what each request gets."""

    def __init__(self, tokenizer: Tokenizer, **options: Any) -> None:
        self.llm_async = AsyncLLM(**options)
        self.engine = SimpleNamespace(model_info=INFO, is_sleeping=False, load=types_pb2.EngineLoad())
        self.llm_async._engine, self.llm_async._tokenizer = cast("Any", self.engine), tokenizer
        self.streams: list[Stream] = []
        self.script: Callable[[EngineRequest], list[Any]] = lambda request: [delta("a"), delta("b", reason="stop")]
        self.num_open = self.most_open = 0
        self.llm_async.open = self.open  # type: ignore[method-assign]  # no engine
        made = LLM.__new__(LLM)
        made._async_llm, made._counts, made._enqueued = self.llm_async, GenerationCounts(), []
        made._draw_seed = random.Random(5)
        made._loop = cast("Any", SimpleNamespace(run=asyncio.run))
        self.llm = made

    def open(self, request: EngineRequest) -> Any:
        self.streams.append(Stream(request, self.script(request)))
        return self.streams[-1]

    @property
    def requests(self) -> list[EngineRequest]:
        return [stream.request for stream in self.streams]


PROMPT = Prompt(text="x", token_ids=[5], cache_salt="salt")
