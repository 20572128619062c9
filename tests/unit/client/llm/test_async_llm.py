"""AsyncLLM and LLMEngine without an engine: what a failed start closes, what is waited for, failures and aborts."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest

from pagoda import LLM, AsyncLLM, EngineArgs, LLMEngine, SamplingParams
from pagoda.llm import async_llm, async_memory_calls
from pagoda.llm.prompts import Prompt
from pagoda.server import engine_process
from pagoda.server.engine_process import PrivateEngine
from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config.engine_config import EMBEDDED_MODEL, EngineConfig
from pagoda_common.errors import InvalidRequest, NotReady, PagodaError, QueueFull
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


# A private engine's life.


class Private:
    """Stands for `PrivateEngine`: records its calls, and raises where the test wants a failure."""

    made: list["Private"]
    fault: BaseException | None = None

    def __init__(self, *, config: EngineConfig) -> None:
        self.config, self.asked = config, list[str]()
        self.client = SimpleNamespace(close=self._close_client)
        self.made.append(self)

    async def _close_client(self) -> None:
        self.asked.append("close client")

    async def start(self) -> None:
        self.asked.append("start")
        if self.fault is not None:
            raise self.fault

    async def stop(self) -> None:
        self.asked.append("stop")


@pytest.fixture
def privates(monkeypatch: pytest.MonkeyPatch) -> list[Private]:
    """Those that were made."""
    Private.made, Private.fault = [], None
    monkeypatch.setattr(async_llm, "PrivateEngine", Private)
    return Private.made


async def test_a_private_engine_starts_once_and_ends_with_the_object(
    privates: list[Private], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []

    def load(source: str, *, revision: str | None) -> str:
        loaded.append((source, revision))
        return "tokenizer"

    monkeypatch.setattr(async_llm.Tokenizer, "load", load)
    llm = AsyncLLM("org/model", revision="r")
    await asyncio.gather(llm.start(), llm.start())
    await llm.start()
    [private] = privates
    assert (private.asked, loaded, llm._tokenizer) == (["start"], [("org/model", "r")], "tokenizer")
    assert private.config.security.service_token, "its services know each other"
    assert private.config == llm.config
    assert llm._engine is private.client
    await llm.shutdown()
    assert (private.asked, llm._engine, llm._process, llm._tokenizer) == (
        ["start", "close client", "stop"],
        None,
        None,
        None,
    )
    await llm.shutdown()
    assert private.asked == ["start", "close client", "stop"]
    async with AsyncLLM("org/model", tokenizer="org/other"):
        assert [one.asked for one in privates[1:]] == [["start"]]
    assert privates[1].asked == ["start", "close client", "stop"]
    assert loaded[-1] == ("org/other", None)


async def test_a_private_engine_that_does_not_start_is_ended(
    privates: list[Private], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_llm.Tokenizer, "load", lambda source, revision: "tokenizer")
    Private.fault = PagodaError("no such model")
    llm = AsyncLLM("org/model")
    with pytest.raises(PagodaError, match="no such model"):
        await llm.start()
    assert (privates[0].asked, llm._tokenizer, llm._process) == (["start", "close client", "stop"], None, None)


async def test_a_model_without_a_tokenizer_starts_no_engine(
    privates: list[Private], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(source: str, *, revision: str | None) -> None:
        raise PagodaError("no tokenizer")

    monkeypatch.setattr(async_llm.Tokenizer, "load", load)
    with pytest.raises(PagodaError, match="no tokenizer"):
        await AsyncLLM("org/model").start()
    assert privates == []


@pytest.mark.parametrize("fault", [None, PagodaError("no such model")])
def test_an_engine_of_arguments_runs_until_it_is_shut_down(
    privates: list[Private], monkeypatch: pytest.MonkeyPatch, fault: PagodaError | None
) -> None:
    monkeypatch.setattr(async_llm.Tokenizer, "load", lambda source, revision: "tokenizer")
    Private.fault = fault
    args = EngineArgs(model="org/model", max_num_seqs=3)
    if fault is None:
        engine = LLMEngine.from_engine_args(args, usage_context=None)
        assert privates[0].asked == ["start"]
        engine.shutdown()
        engine.shutdown()
    else:
        with pytest.raises(PagodaError, match="no such model"):
            LLMEngine.from_engine_args(args)
    assert privates[0].asked == ["start", "close client", "stop"]
    assert privates[0].config.scheduler.max_num_seqs == 3
    threads = [thread.name for thread in threading.enumerate()]
    assert "pagoda-engine" not in threads


def test_an_engine_whose_arguments_nothing_stands_for_does_not_start(privates: list[Private]) -> None:
    with pytest.raises(InvalidRequest, match="stat_loggers is not supported"):
        LLMEngine.from_engine_args(EngineArgs(model="org/model"), stat_loggers=[object])
    assert privates == []


async def test_a_cache_is_forgotten_by_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    answers: list[Any] = [scheduler_pb2.ResetPrefixCacheResponse(num_blocks=7), rpc_error("away")]

    class Stub:
        def __init__(self, channel: Any) -> None:
            asked.append(channel)

        async def ResetPrefixCache(self, request: Any, *, timeout: float) -> Any:
            asked.append((type(request).__name__, timeout))
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    @contextlib.asynccontextmanager
    async def connect(address: str, *, security: Any) -> AsyncIterator[Any]:
        yield address, security

    monkeypatch.setattr(async_memory_calls, "connect", connect)
    monkeypatch.setattr(async_memory_calls.scheduler_pb2_grpc, "SchedulerStub", Stub)
    llm = AsyncLLM()
    llm._engine = cast("Any", SimpleNamespace(address="127.0.0.1:1"))
    assert await llm.reset_prefix_cache() == 7
    assert asked == [("127.0.0.1:1", llm.config.security), ("ResetPrefixCacheRequest", 10.0)]
    with pytest.raises(PagodaError, match="away"):
        await llm.reset_prefix_cache()


def rpc_error(details: str) -> grpc.aio.AioRpcError:
    none = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, details=details, debug_error_string="")


@pytest.mark.parametrize("fault", [None, PagodaError("no such model")])
def test_an_llm_leaves_no_engine_and_no_thread(
    privates: list[Private], monkeypatch: pytest.MonkeyPatch, fault: PagodaError | None
) -> None:
    monkeypatch.setattr(async_llm.Tokenizer, "load", lambda source, revision: "tokenizer")
    Private.fault = fault
    if fault is None:
        with LLM("org/model") as llm:
            assert privates[0].asked == ["start"]
            assert "pagoda-llm" in [thread.name for thread in threading.enumerate()]
        llm.shutdown()
    else:
        with pytest.raises(PagodaError, match="no such model"):
            LLM("org/model")
    assert privates[0].asked == ["start", "close client", "stop"]
    assert "pagoda-llm" not in [thread.name for thread in threading.enumerate()]
