"""Beam search in the engine finds transformers' hypotheses."""

from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import transformers

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tests.exactness.conftest import Reference
from tests.harness.engine import RunningEngine, running_engine

MAX_TOKENS = 16
STOPPING = {
    False: types_pb2.EARLY_STOPPING_HEURISTIC,
    True: types_pb2.EARLY_STOPPING_FIRST,
    "never": types_pb2.EARLY_STOPPING_NEVER,
}


@lru_cache(maxsize=1)
def model_of(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@cache  # whether the engine's steps overlap changes nothing here
def searched(
    directory: Path, prompt: tuple[int, ...], ends: tuple[int, ...], width: int, penalty: float, stopping: bool | str
) -> list[list[int]]:
    """Hypotheses of transformers, best first, without padding."""
    model = model_of(directory)
    pad = model.config.vocab_size - 1
    with torch.inference_mode():
        sequences = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            length_penalty=penalty,
            early_stopping=stopping,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=list(ends),
            pad_token_id=pad,
        )
    outputs = sequences[:, len(prompt) :].tolist()
    return [_ended(output, ends) for output in outputs]


def _ended(output: list[int], ends: tuple[int, ...]) -> list[int]:
    """Without what fills it up, which may be a token that others have found."""
    length = next((place + 1 for place, token in enumerate(output) if token in ends), len(output))
    return output[:length]


async def check_hypotheses(
    engine: RunningEngine, reference: Reference, number: int, *, width: int, penalty: float, stopping: bool | str
) -> int:
    """A prompt's hypotheses are those of transformers; how many of them ended early."""
    prompt = reference.prompts[number]
    ends = sorted({reference.outputs[number][5], reference.outputs[number][9]})
    expected = searched(reference.directory, tuple(prompt), tuple(ends), width, penalty, stopping)
    request = scheduler_pb2.SubmitRequest(
        request_id=f"beam{number}",
        prompt_token_ids=np.array(prompt, dtype="<u4").tobytes(),
        sampling_params=types_pb2.SamplingParams(n=width, max_tokens=MAX_TOKENS),
        eos_token_ids=ends,
        beam_search=types_pb2.BeamSearchParams(
            beam_width=width, length_penalty=penalty, early_stopping=STOPPING[stopping]
        ),
    )
    found: list[list[int]] = [[] for _ in range(width)]
    async for output in engine.scheduler.stub.Generate(request):
        found[output.index] += output.token_ids
    assert found == expected
    return sum(len(tokens) < MAX_TOKENS for tokens in found)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("stopping", [False, True, "never"])
@pytest.mark.parametrize(("width", "penalty"), [(2, 1.0), (4, 0.0), (4, 2.0)])
async def test_the_hypotheses_are_those_of_transformers(
    llama: Reference, width: int, penalty: float, stopping: bool | str, overlaps: bool
) -> None:
    config = EngineConfig(
        model=ModelConfig(model=str(llama.directory), dtype="float32", device="cpu"),
        cache=CacheConfig(kv_cache_memory_bytes=64 * 2**20),
        scheduler=SchedulerConfig(max_num_seqs=32 if penalty else 2),  # beams take turns
    )
    async with running_engine(config, overlaps=overlaps) as engine:
        ended_early = [
            await check_hypotheses(engine, llama, number, width=width, penalty=penalty, stopping=stopping)
            for number in (1, 4, 5)
        ]
        assert engine.scheduler.engine.load().num_used_blocks == 0
    assert sum(ended_early) > 0


async def test_bad_parameters_are_named(llama: Reference) -> None:
    config = EngineConfig(
        model=ModelConfig(model=str(llama.directory), device="cpu"),
        cache=CacheConfig(kv_cache_memory_bytes=64 * 2**20),
        scheduler=SchedulerConfig(max_num_seqs=4),
    )
    async with running_engine(config) as engine:
        for width in (1, 257):
            request = scheduler_pb2.SubmitRequest(
                request_id="a",
                prompt_token_ids=b"\1\0\0\0",
                sampling_params=types_pb2.SamplingParams(n=2, max_tokens=4),
                beam_search=types_pb2.BeamSearchParams(beam_width=width),
            )
            with pytest.raises(grpc.aio.AioRpcError, match="beam_width must be between"):
                await engine.scheduler.stub.Generate(request).read()
