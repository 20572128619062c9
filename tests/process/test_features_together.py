"""Everything that docs/matrix.md says works together, in one engine: ranks, integer weights, an 8-bit cache, a host
cache, drafts and adapters, under plain, seeded, constrained, searched and embedded requests."""

import json
import math
from collections.abc import Iterator

import pytest

from pagoda import LLM, SamplingParams
from pagoda.lora.request import LoRARequest
from pagoda.sampling_params import BeamSearchParams, StructuredOutputsParams
from pagoda_common.config.checkpoint.model_files import resolve_model
from tests.peft_adapters import make_adapter

PROMPT = "The dog and the dog and the dog and"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Anna", "Ben"]}, "is_big": {"type": "boolean"}},
    "required": ["name", "is_big"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    directory = make_adapter(resolve_model("pagoda-tiny"), tmp_path_factory.mktemp("adapter"))
    return LoRARequest("one", 1, str(directory))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        model="pagoda-tiny",
        dtype="float32",
        tensor_parallel_size=2,
        quantization="int8",
        kv_cache_dtype="int8",
        cpu_kv_cache_memory_bytes=32 * 1024**2,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
        enable_lora=True,
    ) as llm:
        yield llm


def texts(llm: LLM, params: SamplingParams, adapter: LoRARequest | None = None) -> list[str]:
    """The outputs of one request."""
    (output,) = llm.generate([PROMPT], params, lora_request=adapter, use_tqdm=False)
    return [one.text for one in output.outputs]


def test_greedy_and_seeded_texts_are_the_same_again_from_the_prefix_cache(llm: LLM, adapter: LoRARequest) -> None:
    greedy, seeded = SamplingParams(temperature=0, max_tokens=40), SamplingParams(seed=7, n=2, max_tokens=40)
    first = [texts(llm, greedy), texts(llm, greedy, adapter), texts(llm, seeded), texts(llm, seeded, adapter)]
    assert len(set(map(str, first))) == 4, "the adapter changes what the model says"
    again = [texts(llm, greedy), texts(llm, greedy, adapter), texts(llm, seeded), texts(llm, seeded, adapter)]
    assert again == first
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    assert metrics["vllm:prefix_cache_hits"].value > 0
    assert metrics["vllm:spec_decode_num_accepted_tokens"].value > 0


@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_constraint_holds(llm: LLM, adapter: LoRARequest, has_adapter: bool) -> None:
    params = SamplingParams(seed=3, max_tokens=60, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    (text,) = texts(llm, params, adapter if has_adapter else None)
    assert set(json.loads(text)) == {"name", "is_big"}


@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_beam_search_finds_its_beams(llm: LLM, adapter: LoRARequest, has_adapter: bool) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=12)
    (output,) = llm.beam_search([PROMPT], params, lora_request=adapter if has_adapter else None)
    assert len({tuple(beam.tokens) for beam in output.sequences}) == 3


def test_the_same_model_embeds(llm: LLM) -> None:
    (output,) = llm.embed([PROMPT], use_tqdm=False)
    assert math.hypot(*output.outputs.embedding) == pytest.approx(1, abs=1e-4)
