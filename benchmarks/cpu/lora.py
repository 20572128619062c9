"""What LoRA adapters cost: W2 with eight adapters, 200 of them on disk with 8 slots, and steps while some are read.

The model is Llama's 125M shape in bfloat16 (random weights), adapters have rank 16 in all projections. All ratios are
to the same requests without adapters in the same engine, which takes turns with them; `without --enable-lora` is
another engine. Steps are gaps between the tokens of a stream, while requests of two tokens ask for one adapter after
the other: first of adapters that have to be read, then again of those in memory.

    python benchmarks/cpu/lora.py --json benchmarks/results/lora.jsonl
    python benchmarks/cpu/lora.py --smoke                                 # tiny: does it run?
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # so that it also runs as a plain script

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence

import torch
from safetensors.torch import save_file

from benchmarks.cpu.checkpoints import make_checkpoint
from benchmarks.cpu.shapes import SHAPES, Shape
from benchmarks.cpu.workloads import MAX_MODEL_LEN, SMOKE, WORKLOADS, Workload
from benchmarks.tools.figures import Report, median, parser
from pagoda import AsyncLLM, SamplingParams
from pagoda.lora.request import LoRARequest
from pagoda_common.params.sampling_params import RequestOutputKind

RANK = 16
NUM_SLOTS = 8
MANY_REQUESTS = 3
"""Of the load on many adapters: so many times W2's."""
Adapters = Sequence[LoRARequest | None]


def write_adapter(shape: Shape, folder: Path, seed: int) -> Path:
    """Random matrices for all projections, as peft writes them."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    sizes = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, kv_heads),
        "self_attn.v_proj": (hidden, kv_heads),
        "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    tensors = {}
    for layer in range(shape.num_layers):
        for name, (num_inputs, num_outputs) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}.lora_"
            tensors[f"{prefix}A.weight"] = torch.randn(RANK, num_inputs, generator=generator) * num_inputs**-0.5
            tensors[f"{prefix}B.weight"] = torch.randn(num_outputs, RANK, generator=generator) * 0.02
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [name[10:] for name in sizes]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Engine:
    """A private engine, on the event loop that runs."""

    def __init__(self, model: Path, **options: object) -> None:
        self._llm = AsyncLLM(str(model), dtype="bfloat16", max_model_len=MAX_MODEL_LEN, **options)

    async def start(self) -> None:
        """Wait until it serves."""
        await self._llm.start()

    async def run(self, prompts: Sequence[list[int]], adapters: Adapters, num_outputs: int) -> float:
        """Output tokens a second of all prompts given at once."""
        params = SamplingParams(
            temperature=0, max_tokens=num_outputs, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )

        async def one(prompt: list[int], adapter: LoRARequest | None) -> int:
            outputs = self._llm.generate(prompt, params, lora_request=adapter)
            return sum([len(output.outputs[0].token_ids) async for output in outputs])

        started = time.perf_counter()
        counts = await asyncio.gather(*map(one, prompts, adapters))
        assert counts == [num_outputs] * len(prompts)
        return sum(counts) / (time.perf_counter() - started)

    async def gaps(self, prompt: list[int], adapters: Sequence[LoRARequest]) -> list[float]:
        """Seconds between the tokens of a stream, while one adapter after the other is asked for."""
        params = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        times: list[float] = []
        has_begun, is_over = asyncio.Event(), asyncio.Event()

        async def follow() -> None:
            async for _ in self._llm.generate(prompt, params):
                times.append(time.perf_counter())
                if len(times) == 10:
                    has_begun.set()
                if is_over.is_set():
                    break

        stream = asyncio.create_task(follow())
        await has_begun.wait()
        first = len(times)
        for number, adapter in enumerate(adapters):
            await self.run([[300 + number % 500, 301]], [adapter], 1)
        is_over.set()
        await stream
        return [after - before for before, after in zip(times[first:], times[first + 1 :], strict=False)]

    async def close(self) -> None:
        """End its processes."""
        await self._llm.shutdown()


def zipf(count: int, num_adapters: int, seed: int) -> list[int]:
    """Numbers of adapters, the i-th as likely as 1 / i."""
    weights = [1 / (place + 1) for place in range(num_adapters)]
    return random.Random(seed).choices(range(num_adapters), weights, k=count)


async def throughput(args: argparse.Namespace, report: Report, model: Path, requests: list[LoRARequest]) -> None:
    """W2 with eight adapters, and three times W2 with many."""
    workload: Workload = (SMOKE if args.smoke else WORKLOADS)["W2"]
    shape = SHAPES["smoke" if args.smoke else "125m"]
    engine = Engine(model, enable_lora=True, max_loras=NUM_SLOTS, max_lora_rank=RANK, max_num_seqs=32)
    plain = Engine(model, max_num_seqs=32)
    await engine.start()
    await plain.start()
    rates: dict[str, list[float]] = {}
    for number in range(args.rounds + 1):  # the first one warms up
        prompts = workload.prompts(vocab_size=shape.vocab_size, seed=str(number))
        many = [
            prompt
            for part in range(MANY_REQUESTS)
            for prompt in workload.prompts(vocab_size=shape.vocab_size, seed=f"{number} {part}")
        ]
        nothing: list[LoRARequest | None] = [None] * len(many)
        eight = [requests[place % NUM_SLOTS] for place in range(len(prompts))]
        drawn = [requests[place] for place in zipf(len(many), len(requests), number)]
        loads: dict[str, tuple[Engine, list[list[int]], Adapters]] = {
            "without --enable-lora": (plain, prompts, nothing[: len(prompts)]),
            "base": (engine, prompts, nothing[: len(prompts)]),
            "8 adapters": (engine, prompts, eight),
            "base of many": (engine, many, nothing),
            f"{len(requests)} adapters": (engine, many, drawn),
        }
        for name in list(loads) if number % 2 else reversed(list(loads)):
            used, asked, adapters = loads[name]
            # No prompt is found in a prefix cache: another first token for each load.
            first = 300 + list(loads).index(name)
            rate = await used.run([[first, *prompt[1:]] for prompt in asked], adapters, workload.num_outputs)
            if number:
                rates.setdefault(name, []).append(rate)
    for name, values in rates.items():
        report.add(f"lora W2 {name}", median(values), "tokens/s", n=len(values))
    of = {name: median(values) for name, values in rates.items()}
    report.add("lora W2 base / without --enable-lora", of["base"] / of["without --enable-lora"], "x", n=args.rounds)
    report.add("lora W2 8 adapters / base", of["8 adapters"] / of["base"], "x", n=args.rounds)
    many_name = f"{len(requests)} adapters"
    report.add(f"lora W2 {many_name} on disk, 8 slots / base", of[many_name] / of["base of many"], "x", n=args.rounds)
    await engine.close()
    await plain.close()


async def steps(args: argparse.Namespace, report: Report, model: Path, requests: list[LoRARequest]) -> None:
    """Gaps between tokens, with adapters that have to be read, and with the same ones in memory."""
    engine = Engine(model, enable_lora=True, max_loras=NUM_SLOTS, max_lora_rank=RANK, max_cpu_loras=len(requests) + 1)
    await engine.start()
    prompt = list(range(400, 416))
    await engine.gaps(prompt, requests[:1])
    read, known = [await engine.gaps(prompt, requests[1:]) for _ in range(2)]
    for name, gaps in (("read", read), ("in memory", known)):
        report.add(f"lora step, median, adapters {name}", 1000 * median(gaps), "ms", n=len(gaps))
        report.add(f"lora step, longest, adapters {name}", 1000 * max(gaps), "ms", n=len(gaps))
    report.add("lora step, longest wait for a load", 1000 * (max(read) - max(known)), "ms", n=len(read))
    await engine.close()


async def run(args: argparse.Namespace) -> None:
    """All of it."""
    report = Report(args.json)
    shape = SHAPES["smoke" if args.smoke else "125m"]
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        model = make_checkpoint(shape, Path(name) / "model")
        requests = []
        for number in range(12 if args.smoke else args.adapters):
            path = write_adapter(shape, Path(name) / f"adapter-{number}", number)
            requests.append(LoRARequest(f"adapter-{number}", number + 1, str(path)))
        if "throughput" in args.parts:
            await throughput(args, report, model, requests)
        if "steps" in args.parts:
            await steps(args, report, model, requests[:60])


if __name__ == "__main__":
    flags = parser(__doc__ or "")
    flags.add_argument("--adapters", type=int, default=200, metavar="N", help="adapters on disk")
    flags.add_argument("--parts", nargs="+", default=["throughput", "steps"], choices=["throughput", "steps"])
    flags.add_argument("--dir", type=Path, help="where model and adapters are written for the run (3 GiB)")
    flags.add_argument("--smoke", action="store_true", help="a tiny model and few adapters")
    asyncio.run(run(flags.parse_args()))
