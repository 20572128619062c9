"""With adapters the tokens are the same alone and in any batch, whatever happens on the way."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pagoda_common.config.checkpoint.model_files import EMBEDDED_MODEL, resolve_model
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.engine.client import EngineRequest
from pagoda_common.params.beam_search import BeamSearchParams
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.text.tokenizer import Tokenizer
from tests.harness.engine import RunningEngine, running_engine
from tests.peft_adapters import make_adapter

NUM_ADAPTERS = 6
MAX_TOKENS = 24
FEW_BLOCKS = 40
"""Of 16 tokens: a request has about 5."""
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoraAdapter]:
    root = tmp_path_factory.mktemp("adapters")
    model = resolve_model(EMBEDDED_MODEL)
    assert isinstance(model, Path)
    paths = [
        make_adapter(model, root / str(seed), seed=seed, r=2 << seed, target_modules="all-linear")
        for seed in range(NUM_ADAPTERS)
    ]
    return [LoraAdapter(name=f"a{number}", path=str(path)) for number, path in enumerate(paths)]


def requests(adapters: list[LoraAdapter]) -> list[EngineRequest]:
    """Greedy, seeded, three sequences, a beam search and a grammar, each with every adapter and with none."""
    tokenizer = Tokenizer.load(EMBEDDED_MODEL)
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "seeded": {"temperature": 0.9, "seed": 5},
        "n": {"temperature": 0.9, "seed": 3, "n": 3},
        "beam": {"n": 2},
        "grammar": {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="([A-Z][a-z]{3,9} ){3}")},
    }
    shared = tokenizer.encode("Once upon a time there was a dog who lived in a house by the sea with two friends. " * 2)
    made = []
    for place, (kind, options) in enumerate(kinds.items()):
        for number, adapter in enumerate([None, *adapters]):
            made.append(
                EngineRequest(
                    request_id=f"{kind}-{number}",
                    prompt_token_ids=shared + tokenizer.encode(f"Story {place}{number}:")[: 1 + number],
                    sampling_params=SamplingParams(
                        max_tokens=MAX_TOKENS, ignore_eos=kind not in ("grammar", "beam"), **options
                    ),
                    beam_search=BeamSearchParams(beam_width=3) if kind == "beam" else None,
                    lora=adapter,
                )
            )
    return made


async def tokens_of(engine: RunningEngine, request: EngineRequest) -> Tokens:
    """Of each sequence."""
    stream = engine.client.submit(request)
    found: Tokens = [[] for _ in range(request.sampling_params.n)]
    while not stream.is_finished:
        for output in await stream.get():
            assert output.error is None, output.error
            found[output.index] += output.token_ids
    return found


async def answers(config: EngineConfig, asked: list[EngineRequest], *, together: bool) -> list[Tokens]:
    async with running_engine(config) as engine:
        if together:
            found = await asyncio.gather(*(tokens_of(engine, request) for request in asked))
        else:
            found = [await tokens_of(engine, request) for request in asked]
        load = engine.client.load
        assert bool(load.num_preemptions) == (config.cache.num_blocks_override == FEW_BLOCKS)
        if together and config.cache.enable_prefix_caching:
            assert load.prefix_cache_hits > 0
        assert engine.scheduler.engine.load().num_used_blocks == 0
        return list(found)


def make_config(
    *,
    cache: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    speculative: SpeculativeConfig | None = None,
    max_loras: int = 4,
    **model: Any,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=EMBEDDED_MODEL, device="cpu", **{"dtype": "float32", **model}),
        cache=CacheConfig(**{"kv_cache_memory_bytes": 64 * 2**20, **(cache or {})}),
        scheduler=SchedulerConfig(**{"max_num_seqs": 32, **(scheduler or {})}),
        speculative=speculative or SpeculativeConfig(),
        lora=LoraConfig(enable_lora=True, max_loras=max_loras, max_cpu_loras=NUM_ADAPTERS - 1),
    )


@pytest.fixture(scope="module")
def expected(adapters: list[LoraAdapter]) -> list[Tokens]:
    """Each request alone."""
    alone = asyncio.run(answers(make_config(), requests(adapters), together=False))
    greedy = [one[0] for one in alone[: 1 + NUM_ADAPTERS]]
    assert len({tuple(tokens) for tokens in greedy}) > NUM_ADAPTERS // 2, "adapters change nothing"
    assert min(len(one[0]) for one in alone[-1 - NUM_ADAPTERS :]) < MAX_TOKENS, "no grammar comes to its end"
    return alone


DRAFTS = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1)
FEW: dict[str, Any] = {"num_blocks_override": FEW_BLOCKS, "cpu_kv_cache_memory_bytes": 16 * 2**20}
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "a batch": {},
    "five adapters of one batch": {"max_loras": NUM_ADAPTERS - 1},
    "no prefix cache": {"cache": {"enable_prefix_caching": False}},
    "chunks": {"scheduler": {"max_num_batched_tokens": 24}},
    "recompute": {"cache": FEW, "scheduler": {"preemption_mode": "recompute"}},
    "swap": {"cache": FEW, "scheduler": {"preemption_mode": "swap", "max_num_batched_tokens": 24}},
    "speculation": {"speculative": DRAFTS},
    "speculation and swap": {"speculative": DRAFTS, "cache": FEW, "scheduler": {"preemption_mode": "swap"}},
    "one after the other": {"scheduler": {"async_scheduling": False}, "max_loras": 1},
}


@pytest.mark.parametrize("name", CIRCUMSTANCES)
async def test_tokens_are_those_of_each_request_alone(
    name: str, adapters: list[LoraAdapter], expected: list[Tokens]
) -> None:
    asked = requests(adapters)
    found = await answers(make_config(**CIRCUMSTANCES[name]), asked, together=True)
    assert {one.request_id for one, ours, other in zip(asked, found, expected, strict=True) if ours != other} == set()


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"cache": {"kv_cache_dtype": "int8"}},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
async def test_tokens_are_those_alone_of_other_kinds_of_numbers(
    options: dict[str, Any], adapters: list[LoraAdapter]
) -> None:
    asked = requests(adapters)[::2]  # every kind of request, and every adapter
    alone = await answers(make_config(**options), asked, together=False)
    few = {**options, "cache": {**options.get("cache", {}), **FEW}}
    found = await answers(make_config(**few), asked, together=True)
    assert {one.request_id for one, ours, other in zip(asked, found, alone, strict=True) if ours != other} == set()
