"""One group from bring-up to loss: calls to the engine, the parts of its core, and which requests count as suspects."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.config.lora_config import CAPABILITY as LORA_CAPABILITY
from pagoda_common.config.speculative_config import CAPABILITY
from pagoda_common.errors import Code, NotReady, PagodaError
from pagoda_common.params.structured_outputs import HOLD_CAPABILITY
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.groups import worker_groups as module
from pagoda_scheduler.groups.worker_group import Rank, WorkerGroup
from pagoda_scheduler.groups.worker_groups import WorkerGroups
from pagoda_scheduler.kv.cache_group import ONE_GROUP, CacheSizes
from pagoda_scheduler.rpc.group_client import BroughtUp


class Core:
    """A core whose loop ends when the test says how."""

    def __init__(self, stage: "Stage", **made_of: Any) -> None:
        self.made_of = made_of
        self.scheduler = SimpleNamespace(max_model_len=48)
        self.warm: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_cancelled = False
        stage.core = self

    async def warm_up(self) -> None:
        await self.warm

    async def run(self) -> None:
        try:
            await self.end
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise


class Stage:
    """Groups whose workers and core are the test's, and what the engine hears."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.core: Core | None = None
        self.brought_up: PagodaError | None = None
        self.engine = Engine(config=EngineConfig())
        self.groups = WorkerGroups(config=self.engine.config, engine=self.engine, session_epoch=7)
        stage = self

        class Client:
            def __init__(self, ranks: list[Any]) -> None:
                self.num_ranks = len(ranks)
                stage.client = self

            async def bring_up(self, config: EngineConfig, weights: Any) -> BroughtUp:
                assert config is stage.engine.config
                if stage.brought_up is not None:
                    raise stage.brought_up
                info = types_pb2.ModelInfo(model="m", max_model_len=64, eos_token_ids=[3, 4], vocab_size=99)
                return BroughtUp(info, ONE_GROUP, CacheSizes(5), 8)

            async def close(self) -> None:
                stage.told.append(("closed",))

        self.client: Client
        monkeypatch.setattr(module, "GroupClient", Client)
        monkeypatch.setattr(module, "WorkerClient", lambda **options: options)
        monkeypatch.setattr(module, "EngineCore", lambda **made_of: Core(self, **made_of))
        monkeypatch.setattr(self.engine, "add_core", lambda core: self.told.append(("serves", core)))
        monkeypatch.setattr(
            self.engine,
            "remove_core",
            lambda core, reason, *, is_fault: self.told.append(("gone", core, reason, is_fault)),
        )

    def group(self, *capabilities: tuple[str, ...]) -> WorkerGroup:
        """A group of a rank for each of these."""
        group = WorkerGroup(0, len(capabilities))
        for number, known in enumerate(capabilities):
            found = scheduler_pb2.WorkerIdentity(address=f"127.0.0.1:{number + 1}", incarnation=1, rank=number)
            found.capabilities.extend(known)
            group.put(Rank(found, address=found.address))
        return group

    async def until_core(self) -> Core:
        while self.core is None:  # noqa: ASYNC110 (what it waits for tells no one)
            await asyncio.sleep(0)
        return self.core


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_group_serves_when_it_is_warm(stage: Stage) -> None:
    group = stage.group(())
    serving = asyncio.create_task(stage.groups._serve(group))
    core = await stage.until_core()
    await settle()
    assert (group.state, stage.told, stage.groups.model_info) == ("loading", [], None)
    assert stage.engine.not_ready_reason == "the model is being loaded"
    core.warm.set_result(None)
    await settle()
    assert stage.told == [("serves", core)]
    assert (group.state, group.core) == ("serving", core)
    info = stage.groups.model_info
    assert info is not None
    assert (info.model, info.max_model_len) == ("m", 48), "what fits the cache"
    made_of = core.made_of
    assert (made_of["sizes"], made_of["groups"], made_of["swap_block_ns"]) == (CacheSizes(5), ONE_GROUP, 8)
    assert (made_of["max_model_len"], list(made_of["eos_token_ids"]), made_of["vocab_size"]) == (64, [3, 4], 99)
    assert made_of["executor"] is stage.client
    serving.cancel()
    await asyncio.wait([serving])


@pytest.mark.parametrize(
    ("ranks", "can_speculate", "can_adapt", "compiles"),
    [
        ([()], False, False, False),
        ([(CAPABILITY, LORA_CAPABILITY, HOLD_CAPABILITY)], True, True, True),
        ([(CAPABILITY, LORA_CAPABILITY, HOLD_CAPABILITY), ()], False, False, True),
        ([(LORA_CAPABILITY,), (CAPABILITY, LORA_CAPABILITY, HOLD_CAPABILITY)], False, True, False),
    ],
)
async def test_a_group_can_what_all_its_ranks_can(
    stage: Stage, ranks: list[tuple[str, ...]], can_speculate: bool, can_adapt: bool, compiles: bool
) -> None:
    """The first rank samples for all: it alone compiles constraints."""
    serving = asyncio.create_task(stage.groups._serve(stage.group(*ranks)))
    made_of = (await stage.until_core()).made_of
    assert (made_of["can_speculate"], made_of["can_adapt"]) == (can_speculate, can_adapt)
    assert made_of["compiler"] is (stage.client if compiles else None)
    assert stage.client.num_ranks == len(ranks)
    serving.cancel()
    await asyncio.wait([serving])


async def test_a_loop_that_fails_is_a_loss_and_tells_its_reason(stage: Stage) -> None:
    group = stage.group(())
    serving = asyncio.create_task(stage.groups._serve(group))
    core = await stage.until_core()
    core.warm.set_result(None)
    await settle()
    core.end.set_exception(ExceptionGroup("tasks", [NotReady("a step hangs")]))
    with pytest.raises(PagodaError, match="worker group 0 was lost: a step hangs") as caught:
        await asyncio.wait_for(serving, 240)
    assert caught.value.code is Code.UNAVAILABLE, "a client may try again"
    gone, closed = stage.told[1:]
    assert gone == ("gone", core, "worker group 0 was lost: a step hangs", True)
    assert closed == ("closed",)
    assert group.core is None
    assert stage.groups._has_vacancy.is_set()
    assert stage.engine.not_ready_reason == "worker group 0 was lost: a step hangs"


@pytest.mark.parametrize("is_held", [False, True])
async def test_a_group_that_is_held_is_no_fault(stage: Stage, is_held: bool) -> None:
    group = stage.group(())
    serving = asyncio.create_task(stage.groups._serve(group))
    core = await stage.until_core()
    core.warm.set_result(None)
    await settle()
    if is_held:
        group.hold.want("it sleeps")
    serving.cancel()
    await asyncio.wait([serving])
    reason = "it sleeps" if is_held else "worker group 0 was lost"
    assert stage.told[1:] == [("gone", core, reason, not is_held), ("closed",)]
    assert core.is_cancelled


async def test_a_group_that_leaves_is_no_fault(stage: Stage) -> None:
    group = stage.group(())
    serving = asyncio.create_task(stage.groups._serve(group))
    core = await stage.until_core()
    core.warm.set_result(None)
    await settle()
    group.state = "leaving"
    serving.cancel()
    await asyncio.wait([serving])
    assert stage.told[1][3] is False


async def test_a_group_that_is_not_brought_up_has_no_core(stage: Stage) -> None:
    stage.brought_up = PagodaError("out of memory")
    with pytest.raises(PagodaError, match="out of memory"):
        await stage.groups._serve(stage.group(()))
    assert stage.told == [("closed",)]
    assert stage.engine.not_ready_reason == "out of memory", "as the worker says it"


async def test_a_loop_that_ends_before_the_group_is_warm_fails_it(stage: Stage) -> None:
    serving = asyncio.create_task(stage.groups._serve(stage.group(())))
    core = await stage.until_core()
    core.end.set_exception(NotReady("the stream ended"))
    with pytest.raises(NotReady, match="the stream ended"):
        await asyncio.wait_for(serving, 240)
    assert stage.told[0] == ("gone", core, "worker group 0 was lost: the stream ended", True)
    assert stage.groups.model_info is None
