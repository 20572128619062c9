"""Constrained outputs are the same alone, in a crowd that is preempted, and with a worker lost on the way."""

import asyncio
from typing import Any

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.engine.client import EngineClient, EngineRequest
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.text.tokenizer import Tokenizer
from tests.harness.engine import running_engine, running_worker
from tests.harness.scheduler import running_scheduler

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "pages": {"type": "array", "items": {"type": "string", "minLength": 10, "maxLength": 40}, "minItems": 4},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2030},
    },
    "required": ["title", "pages", "year"],
}
TAG = {
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call="],
        "tags": [
            {"begin": "<call=a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</call>"},
            {"begin": "<call=b>", "content": {"type": "regex", "pattern": "[0-9]{20}"}, "end": "</call>"},
        ],
        "at_least_one": True,
    }
}
CONSTRAINTS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": "([A-Z][a-z]{3,9} ){12}"},
    {"choice": ["a very long answer that takes some tokens to write down", "another one, not quite as long"]},
    {"grammar": 'root ::= ("(" [a-z]+ ")"){5,8}'},
    {"grammar": 'start: (WORD ",")~10\nWORD: /[a-z]{4,8}/'},
    {"structural_tag": TAG},
    {"json_object": True},
    {"json": SCHEMA, "disable_any_whitespace": True, "start_after_token_ids": [262]},
]
MAX_TOKENS = 90


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts with parameters, each constraint greedy and at random, and free ones between them."""
    tokenizer = Tokenizer.load("pagoda-tiny")
    made = []
    for number, constraint in enumerate([*CONSTRAINTS, None] * 2):
        params = SamplingParams(
            temperature=(0.0, 0.9)[number // (len(CONSTRAINTS) + 1)],
            seed=number,
            max_tokens=MAX_TOKENS,
            structured_outputs=StructuredOutputsParams(**constraint) if constraint is not None else None,
        )
        made.append((tokenizer.encode(f"Story number {number}: once upon a time a dog"), params))
    return made


def config(**cache: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(max_model_len=256),
        cache=CacheConfig(kv_cache_memory_bytes=64 << 20, **cache),
        scheduler=SchedulerConfig(max_num_seqs=32),
    )


async def outputs(
    client: EngineClient, *, at_once: bool, prefix: str = "", is_under_way: asyncio.Event | None = None
) -> list[list[int]]:
    """Output tokens of all requests; `is_under_way` is set when one has ten."""

    async def one(number: int, prompt: list[int], params: SamplingParams) -> list[int]:
        request = EngineRequest(request_id=f"{prefix}{number}", prompt_token_ids=prompt, sampling_params=params)
        stream = client.submit(request)
        tokens: list[int] = []
        while not stream.is_finished:
            for output in await stream.get():
                tokens += output.token_ids
            if is_under_way is not None and len(tokens) >= 10:
                is_under_way.set()
        return tokens

    tasks = [one(number, prompt, params) for number, (prompt, params) in enumerate(requests())]
    return await asyncio.gather(*tasks) if at_once else [await task for task in tasks]


async def test_preempted_and_resumed_outputs_equal_undisturbed_ones() -> None:
    async with running_engine(config()) as engine:
        undisturbed = await outputs(engine.client, at_once=False)
        assert await outputs(engine.client, at_once=True, prefix="again") == undisturbed
        assert engine.client.load.num_preemptions == 0
    async with running_engine(config(num_blocks_override=32)) as engine:
        assert await outputs(engine.client, at_once=True) == undisturbed
        assert engine.client.load.num_preemptions > 0
    async with running_scheduler(config()) as scheduler:
        client = EngineClient(address=scheduler.address)
        await client.start()
        async with running_worker(scheduler.address):
            await client.wait_until_ready(240)
            is_under_way = asyncio.Event()
            running = asyncio.create_task(outputs(client, at_once=True, is_under_way=is_under_way))
            async with asyncio.timeout(240):
                await is_under_way.wait()
        assert not running.done()
        async with running_worker(scheduler.address):
            assert await running == undisturbed
            assert client.load.num_worker_losses == 1
        await client.close()
