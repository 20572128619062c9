"""Steps on a CUDA device: graphs give the same tokens, nothing waits in the middle, memory is what was asked for."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.memory.profiling import peak_activation_bytes
from pagoda_worker.steps.step import NewRequest, StepInput
from pagoda_worker.worker import Worker
from tests.unit.worker.driver import Driver
from tests.unit.worker.steps.step_scripts import (
    BLOCK_SIZE,
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    Script,
    run_ahead,
    run_one_by_one,
    told,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPTS = [list(range(start, start + 3 + 7 * start % 60)) for start in range(10, 21)]
PARAMS = [
    SamplingParams(temperature=0.0, seed=1, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=2, top_p=0.9, top_k=40, min_p=0.01, ignore_eos=True),
    SamplingParams(
        temperature=0.7,
        seed=3,
        presence_penalty=0.5,
        repetition_penalty=1.2,
        min_tokens=5,
        logit_bias={7: 1.0},
        bad_words_token_ids=[[9], [5, 6]],
    ),
    SamplingParams(temperature=0.0, seed=4, logprobs=3, ignore_eos=True),
]
LAUNCHED = [
    *PARAMS[:2],
    SamplingParams(
        temperature=0.8,
        seed=9,
        bad_words_token_ids=[[9]],
        presence_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias={7: 2.0},
        min_tokens=5,
    ),
    PARAMS[3],
]
"""Sampled without anything of the host's token log."""
EACH = [PARAMS[place % len(PARAMS)] for place in range(len(PROMPTS))]


def make_driver(**options: Any) -> Driver:
    return Driver("pagoda-tiny", device="cuda", **options)


@contextmanager
def no_wait_goes_unseen() -> Iterator[None]:
    """Within: whatever makes the host wait for the device raises, but for waits for events."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_tokens_are_the_same_with_graphs_and_without() -> None:
    driver = make_driver()
    runner = driver.worker._runner
    assert runner is not None
    assert runner.forward.decode_graphs is not None, "they were recorded"
    with_graphs = [sequence.output for sequence in driver.generate(PROMPTS, EACH, max_tokens=30, chunk=20)]
    eager = make_driver(enforce_eager=True)
    assert eager.worker._runner is not None
    assert eager.worker._runner.forward.decode_graphs is None
    assert with_graphs == [sequence.output for sequence in eager.generate(PROMPTS, EACH, max_tokens=30, chunk=20)]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_nothing_waits_but_for_the_tokens_at_the_end(enforce_eager: bool) -> None:
    driver = make_driver(enforce_eager=enforce_eager)
    expected = driver.generate(PROMPTS, EACH, max_tokens=12, chunk=20)  # compiles
    with no_wait_goes_unseen():
        again = driver.generate(PROMPTS, EACH, max_tokens=12, chunk=20)
    assert [sequence.output for sequence in again] == [sequence.output for sequence in expected]


def steps_of(num_decodes: int) -> list[StepInput]:
    """Prompts together, then decodes of all, then of every second one; no one reads the log on the host."""
    requests = [
        NewRequest(
            slot=slot,
            request_id=str(slot),
            prompt_token_ids=np.array(prompt),
            sampling_params=LAUNCHED[slot % len(LAUNCHED)],
            block_ids=np.arange(8 * slot, 8 * slot + 8),
        )
        for slot, prompt in enumerate(PROMPTS)
    ]
    slots, lengths = np.arange(len(PROMPTS)), np.array([len(prompt) for prompt in PROMPTS])
    first = StepInput(new_requests=requests, num_seqs=slots.size, slots=slots, num_scheduled_tokens=lengths)
    odd = slots[1::2].copy()
    half = StepInput(freed_slots=slots[::2], num_seqs=odd.size, slots=odd)
    last = StepInput(freed_slots=odd)
    every, few = StepInput(num_seqs=slots.size), StepInput(num_seqs=half.num_seqs)
    return [first, *[every] * num_decodes, half, *[few] * num_decodes, last]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_steps_that_run_ahead_give_the_same_tokens_and_wait_for_nothing_else(enforce_eager: bool) -> None:
    worker = make_driver(enforce_eager=enforce_eager).worker
    assert isinstance(worker, Worker)
    steps = steps_of(12)
    expected = [told(output) for output in run_one_by_one(worker, steps)]
    with no_wait_goes_unseen():
        outputs, num_ahead = run_ahead(worker, steps)
    assert [told(output) for output in outputs] == expected
    assert num_ahead == 25, "all but the first, and the last, which is empty"


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_steps_with_parts_of_prompts_run_ahead_as_well(enforce_eager: bool, seed: int) -> None:
    worker = make_driver(
        enforce_eager=enforce_eager, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS
    ).worker
    assert isinstance(worker, Worker)
    script = Script(seed, LAUNCHED, joins=0.5, chunks=True, shares=True).add(80)
    expected = [told(output) for output in run_one_by_one(worker, script.steps)]
    worker.initialize_cache(num_blocks=NUM_BLOCKS, num_cpu_blocks=0)
    with no_wait_goes_unseen():
        outputs, num_ahead = run_ahead(worker, script.steps)
    assert [told(output) for output in outputs] == expected
    assert (num_ahead, script.num_mixed > 10) == (79, True)


def test_a_step_is_launched_while_the_one_before_computes() -> None:
    worker = make_driver().worker
    assert isinstance(worker, Worker)
    first, decode, *_ = steps_of(1)
    worker.execute_model(first)
    worker.execute_model(decode)
    torch.cuda._sleep(200_000_000)  # about 0.1 s in front of all that follows
    begun = [worker.begin(decode) for _ in range(2)]
    assert not any(step.is_done for step in begun), "both are launched, and none has been waited for"
    tokens = [step.result().token_ids for step in begun]
    assert all((one >= 0).all() for one in tokens)


def test_the_debug_mode_sees_a_wait() -> None:
    with no_wait_goes_unseen(), pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones(1, device="cuda").item()


def test_the_share_of_memory_in_use_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "vocab_size": 50000,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    worker, share = Worker(), 0.6
    worker.init_device(
        EngineConfig(
            model=ModelConfig(model=str(tmp_path), load_format="dummy", device="cuda"),
            cache=CacheConfig(gpu_memory_utilization=share),
            scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=4096),
        )
    )
    worker.load_model(lambda loaded, total: None)
    available = worker.determine_num_available_blocks()
    worker.initialize_cache(num_blocks=available.num_blocks, num_cpu_blocks=0)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    in_use = total - free
    assert in_use < share * total
    # What the largest step takes is not in use between steps.
    assert in_use + peak_activation_bytes(worker._loaded_model()) == pytest.approx(share * total, rel=0.02)
