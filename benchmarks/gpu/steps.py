"""Whole steps of the worker with random weights: decodes and prompts at the shapes of Llama-3.1-8B and Qwen3-0.6B."""

import itertools
import json
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.tools.timing import Figures
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.steps.input_batch import ForwardInputs
from pagoda_worker.steps.step import NewRequest, StepInput
from pagoda_worker.steps.step_clock import StepClock
from pagoda_worker.steps.steps_in_flight import LaunchedStep
from pagoda_worker.worker import Worker

BLOCK_SIZE = 16
_SHARED = {"hidden_act": "silu", "torch_dtype": "bfloat16", "max_position_embeddings": 40960}
SHAPES: dict[str, dict[str, Any]] = {
    "8B": _SHARED
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "0.6B": _SHARED
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300}


def measure_steps(figures: Figures, name: str, *, is_small: bool) -> None:
    """Decodes of one sequence and of many, as CUDA graphs and without, one after the other and overlapping, and a
    prompt; against the time that their bytes take to read, or their products to compute."""
    config = SHAPES[name] | (TINY if is_small else {})
    decodes = ((2, 20),) if is_small else ((1, 2048), (64, 1024), (256, 1024))
    prompt = 30 if is_small else 8192
    num_blocks = max(batch * (length // BLOCK_SIZE + 4) for batch, length in (*decodes, (1, prompt)))
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        worker = make_worker(directory, figures.device, num_blocks, prompt)
    facts = worker.facts
    assert facts is not None, "the model is loaded"
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 2
    steps = 3 if is_small else 30
    runner = worker._runner
    assert runner is not None, "the cache is there"
    for is_eager in (False, True):
        if is_eager:
            runner.forward.decode_graphs = None
        for (batch, length), overlaps in itertools.product(decodes, (False, True)):
            busy = BusyTimes(worker, figures.device)
            seconds = statistics.median(_decode(worker, batch, length, steps, overlaps=overlaps))
            num_bytes = facts.weight_bytes + batch * length * token_bytes
            case = f"batch {batch}, {length} tokens{', no graphs' * is_eager}{', overlapping' * overlaps}"
            figures.add(f"{name} decode step", case, seconds, num_bytes=num_bytes, busy_seconds=busy.median())
    seconds = statistics.median([_prompt(worker, prompt) for _ in range(2 if is_small else 5)][1:])
    attention = 2 * prompt * prompt * head_dim * config["num_attention_heads"] * config["num_hidden_layers"]
    num_flops = 2 * prompt * facts.num_parameters + attention
    figures.add(f"{name} prompt step", f"{prompt} tokens", seconds, num_flops=num_flops)


def make_worker(directory: str, device: torch.device, num_blocks: int, longest: int) -> Worker:
    """A worker with random weights and a cache."""
    worker = Worker(overlaps=True)
    worker.init_device(
        EngineConfig(
            model=ModelConfig(
                model=directory,
                load_format="dummy",
                dtype="bfloat16",
                device="cuda" if device.type == "cuda" else "cpu",
                max_model_len=longest + 64,
            ),
            cache=CacheConfig(block_size=BLOCK_SIZE),
            scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=max(longest, 8192)),
        )
    )
    worker.load_model(lambda loaded, total: None)
    worker.initialize_cache(num_blocks=num_blocks, num_cpu_blocks=0)
    return worker


def _requests(batch: int, length: int, num_computed: int) -> list[NewRequest]:
    blocks = -(-length // BLOCK_SIZE) + 3
    prompt = np.arange(length) % 200
    return [
        NewRequest(
            slot=slot,
            request_id=str(slot),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True),
            block_ids=np.arange(slot * blocks, (slot + 1) * blocks),
            num_computed_tokens=num_computed,
        )
        for slot in range(batch)
    ]


class BusyTimes:
    """How long the device works for each step: between events before and after all that a step launches."""

    def __init__(self, worker: Worker, device: torch.device, *, delay_cycles: int = 0) -> None:
        """Listens from now on until `median`. On a CPU there is nothing to hear.

        `delay_cycles`: of the device's clock, which it waits before each step, so that all of the step is launched by
        then and the time has no gaps of the host in it.
        """
        self._delay_cycles = delay_cycles
        runner = worker._runner
        assert runner is not None, "the cache is there"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._in_flight, self._launch = runner._in_flight, runner._in_flight.launch
        if device.type == "cuda":
            self._in_flight.launch = self._timed  # type: ignore[method-assign]  # heard, then done as before

    def _timed(self, step: StepInput, inputs: ForwardInputs, clock: StepClock) -> LaunchedStep:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if self._delay_cycles:
            torch.cuda._sleep(self._delay_cycles)  # type: ignore[no-untyped-call]  # torch: it has no types
        begin.record()
        launched = self._launch(step, inputs, clock)
        end.record()
        self._events.append((begin, end))
        return launched

    def median(self) -> float | None:
        """Seconds a step; None where nothing was heard."""
        self._in_flight.launch = self._launch  # type: ignore[method-assign]  # as it was
        if not self._events:
            return None
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) / 1e3 for begin, end in self._events)


def _decode(worker: Worker, batch: int, length: int, num_steps: int, *, overlaps: bool) -> list[float]:
    """Seconds of each step. What stands in the cache does not matter, so no prompt is computed.

    `overlaps`: the next step is there when one begins, as with asynchronous scheduling.
    """
    slots = np.arange(batch)
    worker.execute_model(StepInput(new_requests=_requests(batch, length, length - 1), num_seqs=batch, slots=slots))
    times, decode = [], StepInput(num_seqs=batch)
    begun = deque([worker.begin(decode)] if overlaps else [])
    for _ in range(num_steps):
        started = time.perf_counter()
        begun.append(worker.begin(decode))
        begun.popleft().result()  # tokens come back: of this step, or of the one before
        times.append(time.perf_counter() - started)
    while begun:
        begun.popleft().result()
    worker.execute_model(StepInput(freed_slots=slots))
    return times[num_steps // 5 :]


def _prompt(worker: Worker, length: int) -> float:
    """Seconds for a prompt in one step."""
    slots = np.arange(1)
    step = StepInput(
        new_requests=_requests(1, length, 0), num_seqs=1, slots=slots, num_scheduled_tokens=np.array([length])
    )
    started = time.perf_counter()
    worker.execute_model(step)
    elapsed = time.perf_counter() - started
    worker.execute_model(StepInput(freed_slots=slots))
    return elapsed
