"""AsyncLLM and LLMEngine without an engine: what a failed start closes, what is waited for, failures and aborts."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda import AsyncLLM, LLMEngine, SamplingParams
from pagoda.llm import async_llm
from pagoda.llm.prompts import Prompt
from pagoda.server import engine_process
from pagoda.server.engine_process import PrivateEngine
from pagoda.v1 import types_pb2
from pagoda_common.config.engine_config import EMBEDDED_MODEL, EngineConfig
from pagoda_common.errors import NotReady, PagodaError, QueueFull
from pagoda_common.text.tokenizer import Tokenizer


class Engine:
    """A connection to a scheduler that never becomes ready. Notes what it is asked for."""

    made: list["Engine"]

    def __init__(self, **_: Any) -> None:
        self.asked: list[str] = []
        self.control = self
        self.made.append(self)

    async def start(self) -> None:
        self.asked.append("start")

    async def wait_until_ready(self, timeout_s: float | None = None) -> None:
        self.asked.append("wait")
        if len(self.asked) == 2 and self.asked[0] == "start":
            raise NotReady("away")

    async def wake_up(self, tags: Any) -> None:
        self.asked.append("wake_up")

    async def close(self) -> None:
        self.asked.append("close")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Those that were made."""
    Engine.made = []
    monkeypatch.setattr(async_llm, "EngineClient", Engine)
    return Engine.made


async def test_a_start_that_fails_closes_what_it_has_opened(engines: list[Engine]) -> None:
    llm = AsyncLLM(address="127.0.0.1:1")
    for _ in range(2):
        with pytest.raises(NotReady, match="away"):
            await llm.start()
    assert [engine.asked for engine in engines] == [["start", "wait", "close"]] * 2


@pytest.mark.parametrize(
    ("tags", "waits"),
    [(None, True), ([], True), (["weights"], False), (["kv_cache"], True), (["weights", "kv_cache"], True)],
)
async def test_waking_up_waits_for_an_engine_that_serves_again(tags: list[str] | None, waits: bool) -> None:
    llm, Engine.made = AsyncLLM(), []
    engine = Engine()
    llm._engine = cast("Any", engine)
    await llm.wake_up(tags)
    assert engine.asked == (["wake_up", "wait"] if waits else ["wake_up"])


def test_bad_words_are_those_of_the_call_and_not_of_the_one_before() -> None:
    llm = AsyncLLM()
    llm._tokenizer = tokenizer = Tokenizer.load(EMBEDDED_MODEL)
    prompt = Prompt(token_ids=[1], text=None)
    for word in ("house", "tree", "tree", "house"):
        request = llm.make_request(prompt, SamplingParams(bad_words=[word]))
        banned = request.sampling_params.bad_words_token_ids
        assert {tokenizer.decode(ids).strip() for ids in banned} == {word}


def test_constraints_are_compiled_for_the_revision_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(async_llm, "BoundedCompiler", lambda compiler, **options: told.append(options))
    llm = AsyncLLM(revision="v1.5")
    llm._tokenizer = Tokenizer.load(EMBEDDED_MODEL)
    info = types_pb2.ModelInfo(vocab_size=3072, eos_token_ids=[2])
    llm._engine = cast("Any", SimpleNamespace(model_info=info))
    _ = llm._grammars
    assert [options["revision"] for options in told] == ["v1.5"]


class Opened:
    """A request of LLMEngine that fails, or runs until it is cancelled."""

    def __init__(self, error: PagodaError | None = None) -> None:
        self._error = error
        self.is_finished = self.has_news = self.has_ended = False

    async def follow(self, on_news: asyncio.Event) -> None:
        if self._error is not None:
            raise self._error
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            self.has_ended = True


def llm_engine() -> LLMEngine:
    config = SimpleNamespace(model=SimpleNamespace(seed=0))
    return LLMEngine(cast("Any", SimpleNamespace(config=config)), cast("Any", None))


async def test_failures_that_came_together_are_raised_by_one_step_each() -> None:
    engine = llm_engine()
    names = ["first", "second", "third"]
    for name in names:
        await engine._start(name, cast("Any", Opened(QueueFull(name))))
    await asyncio.gather(*engine._tasks.values())
    for name in names:
        assert engine.has_unfinished_requests()
        step = asyncio.create_task(engine._step())
        for _ in range(5):
            await asyncio.sleep(0)
        assert step.done(), "it waits for news though there is some"
        with pytest.raises(QueueFull, match=name):
            await step
    assert not engine.has_unfinished_requests()


async def test_an_abort_returns_when_the_request_has_ended() -> None:
    engine, opened = llm_engine(), Opened()
    await engine._start("a", cast("Any", opened))
    await asyncio.sleep(0)
    await engine._abort(["a"])
    assert opened.has_ended


async def test_warnings_of_a_private_engine_are_shown_once_it_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watching = asyncio.Event()

    async def never(*_: Any, **__: Any) -> str:
        watching.set()
        try:
            await asyncio.Event().wait()
        finally:
            watching.clear()
        return ""

    monkeypatch.setattr(engine_process, "find_load_fault", never)
    monkeypatch.setattr(engine_process, "check_model", lambda config: None)
    engine = PrivateEngine(config=EngineConfig())
    client = SimpleNamespace(address="a", start=lambda: asyncio.sleep(0), wait_until_ready=watching.wait)
    engine.client = cast("Any", client)
    monkeypatch.setattr(engine, "_supervisor", SimpleNamespace(run=asyncio.Event().wait))
    with caplog.at_level(logging.WARNING, logger=engine_process.__name__):
        engine._take_line("worker", "WARNING early")
        await engine.start()
        engine._take_line("worker", "WARNING late")
    assert [record.getMessage() for record in caplog.records] == ["WARNING late"]
    await asyncio.sleep(0)
    assert not watching.is_set(), "no one looks for faults of a load that is over"
    assert engine._task is not None
    engine._task.cancel()
