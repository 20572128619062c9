"""What structured output costs: time per decode step with 16 constrained sequences and with 16 free ones, same model.

    python benchmarks/structured_output.py --json benchmarks/results/structured_output.jsonl

The model has 0.1 billion random weights and a vocabulary of 32,000 (float32 on a CPU). The worker's core runs in this
process: prefill, then decode steps, free and constrained ones in turn, so that what else the machine does hits both.
Each constraint is an endless list of objects; no sequence ends. Goal: at most 5 %.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # so that it also runs as a plain script

import json
import random
import tempfile
import time
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.tools.figures import Report, median, parser
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_worker.steps.step import NewRequest, StepInput
from pagoda_worker.worker import Worker

VOCAB_SIZE = 32_000
PROMPT_TOKENS = 64
BLOCK_SIZE = 16
WARM_UP_STEPS = 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "size": {"type": "integer", "minimum": 0, "maximum": 9999},
            "kind": {"enum": ["small", "large", "other"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        },
        "required": ["name", "size", "kind", "tags"],
        "additionalProperties": False,
    },
}


def write_checkpoint(directory: Path) -> None:
    """A configuration and a tokenizer whose tokens look like a real one's: words, numbers and signs of all lengths."""
    (directory / "config.json").write_text(json.dumps(CONFIG))
    draw = random.Random(0)
    first = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: place for place, token in enumerate(first)}
    while len(vocabulary) < VOCAB_SIZE:
        letters = '{}[]":,.0123456789-_ ' if draw.random() < 0.1 else "etaoinshrdlucmfwypvbgkjqxz"
        word = "".join(draw.choice(letters) for _ in range(draw.randint(2, 9)))
        vocabulary.setdefault(("\u0120" if draw.random() < 0.5 else "") + word.replace(" ", "\u0120"), len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


class Batch:
    """Sequences that decode together in slots of their own."""

    def __init__(
        self, worker: Worker, *, first_slot: int, num_seqs: int, num_steps: int, params: SamplingParams
    ) -> None:
        self._worker = worker
        self._slots = np.arange(first_slot, first_slot + num_seqs)
        blocks = -(-(PROMPT_TOKENS + num_steps + WARM_UP_STEPS + 1) // BLOCK_SIZE)
        generator = np.random.default_rng(0)
        self._first = [
            NewRequest(
                slot=slot,
                request_id=str(slot),
                prompt_token_ids=generator.integers(2, VOCAB_SIZE, PROMPT_TOKENS),
                sampling_params=params,
                block_ids=np.arange(slot * blocks, (slot + 1) * blocks),
                eos_token_ids=(1,),
            )
            for slot in self._slots.tolist()
        ]

    def start(self) -> None:
        """The prompts."""
        self._worker.execute_model(
            StepInput(
                new_requests=self._first,
                num_seqs=self._slots.size,
                slots=self._slots,
                num_scheduled_tokens=np.full(self._slots.size, PROMPT_TOKENS),
            )
        )

    def step(self) -> tuple[float, float]:
        """One decode step: milliseconds in all, and of sampling (the wait for the mask is part of it)."""
        started = time.perf_counter()
        output = self._worker.execute_model(StepInput(num_seqs=self._slots.size, slots=self._slots))
        assert not output.bad_slots, output.bad_slots
        return (time.perf_counter() - started) * 1e3, output.timings.sample_ns / 1e6

    def free(self) -> None:
        """Empty the slots."""
        self._worker.execute_model(StepInput(freed_slots=self._slots))


def main() -> None:
    """Print and append the figures."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--num-seqs", type=int, default=16, metavar="N", help="sequences in the batch")
    arguments.add_argument("--steps", type=int, default=64, metavar="N", help="decode steps of each kind in a round")
    flags = arguments.parse_args()
    report = Report(flags.json)
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory))
        worker = Worker()
        worker.init_device(
            EngineConfig(
                model=ModelConfig(model=directory, load_format="dummy", dtype="float32"),
                cache=CacheConfig(block_size=BLOCK_SIZE, kv_cache_memory_bytes=1 << 30),
                scheduler=SchedulerConfig(max_num_seqs=2 * flags.num_seqs),
            )
        )
        facts = worker.load_model(lambda loaded, total: None)
        blocks = -(-(PROMPT_TOKENS + flags.steps + WARM_UP_STEPS + 1) // BLOCK_SIZE)
        worker.initialize_cache(num_blocks=2 * flags.num_seqs * blocks, num_cpu_blocks=0)
        print(f"model: {facts.num_parameters / 1e6:.0f} M parameters, {facts.vocab_size} tokens, {facts.dtype}")
        measure(report, worker, num_seqs=flags.num_seqs, num_steps=flags.steps, num_rounds=flags.rounds)


def measure(report: Report, worker: Worker, *, num_seqs: int, num_steps: int, num_rounds: int) -> None:
    """Free and constrained steps in turn; the medians of each round, and the median of the rounds' ratios."""
    constraint = StructuredOutputsParams(json=SCHEMA)
    kinds: dict[str, dict[str, Any]] = {"free": {}, "constrained": {"structured_outputs": constraint}}
    ratios: list[float] = []
    medians: dict[str, list[float]] = {kind: [] for kind in kinds}
    sampling: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(num_rounds):
        batches = {
            kind: Batch(
                worker,
                first_slot=place * num_seqs,
                num_seqs=num_seqs,
                num_steps=num_steps,
                params=SamplingParams(temperature=0, max_tokens=None, **options),
            )
            for place, (kind, options) in enumerate(kinds.items())
        }
        times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for batch in batches.values():
            batch.start()
        for number in range(WARM_UP_STEPS + num_steps):
            for kind in sorted(kinds, reverse=number % 2 == 0):
                times[kind].append(batches[kind].step())
        for batch in batches.values():
            batch.free()
        for kind, steps in times.items():
            medians[kind].append(median([total for total, _ in steps[WARM_UP_STEPS:]]))
            sampling[kind].append(median([sample for _, sample in steps[WARM_UP_STEPS:]]))
        ratios.append(medians["constrained"][-1] / medians["free"][-1])
    count = num_rounds * num_steps
    for kind in kinds:
        report.add(f"structured_output_step_ms_{kind}_{num_seqs}", median(medians[kind]), "ms", n=count)
        report.add(f"structured_output_sample_ms_{kind}_{num_seqs}", median(sampling[kind]), "ms", n=count)
    print(f"ratios of the rounds: {', '.join(f'{ratio:.4f}' for ratio in ratios)}")
    report.add(f"structured_output_cost_{num_seqs}", 100 * (median(ratios) - 1), "%", n=num_rounds)


if __name__ == "__main__":
    main()
