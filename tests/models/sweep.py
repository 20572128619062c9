"""Every causal language model type of the installed transformers, tiny and random: Pagoda's tokens against its own.

    python -m tests.models.sweep [--types llama gpt2] [--json] [--impl auto]

For each type: prompts of 1, 15, 17, 100 and 300 tokens, in whole prefills and in chunks, each twice (the second finds
its prefix in the cache). Greedy tokens must be equal and log probabilities within 1e-3, in float32.
"""

import argparse
import asyncio
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.errors import ModelLoadError, PagodaError
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.loader.build import ModelBuilder
from pagoda_worker.models.model import BuildConfig
from pagoda_worker.models.registry import MODEL_TYPES, architectures_of, find_family, is_foreign
from pagoda_worker.parallel.tensor_parallel import ALONE
from pagoda_worker.worker import Worker
from tests import deci_lm
from tests.checkpoints import TEXT_PARTS, write_as_text_part
from tests.harness.engine import running_engine
from tests.models.abilities import abilities_of
from tests.models.tiny_configs import VOCAB_SIZE, tiny_config

LENGTHS = (1, 15, 17, 100, 300)
NUM_TOKENS = 8
TOLERANCE = 1e-3
CHUNK = 64
"""Most tokens of a step where prompts are cut."""
MAX_REASON = 200
MAX_PARAMETERS = 50_000_000
MAX_SECONDS = 60
"""Of one type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of one type."""

    model_type: str
    architecture: str
    verdict: str
    """exact, wrong, refused, or broken: the sweep or transformers cannot make or run it."""
    implementation: str = ""
    """pagoda or transformers."""
    reason: str = ""
    seconds: float = 0.0
    ranks: str = ""
    """As of Abilities; so are adapters and integers. Of a type that is exact."""
    adapters: str = ""
    integers: str = ""


def model_types() -> list[str]:
    """All of the installed transformers, and those that tests compute of its parts."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, deci_lm.MODEL_TYPE]


def sweep(types: list[str], impl: str = "auto") -> Iterator[Outcome]:
    """One after the other."""
    for model_type in types:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            try:
                signal.alarm(MAX_SECONDS)
                outcome = _judge(model_type, Path(directory), impl)
            except Exception as error:
                if os.environ.get("SWEEP_DEBUG"):
                    traceback.print_exc()
                outcome = {"verdict": "broken", "reason": f"{type(error).__name__}: {error}"}
            finally:
                signal.alarm(0)
        yield Outcome(
            model_type=model_type,
            architecture=str(outcome.pop("architecture", "")),
            seconds=round(time.monotonic() - started, 1),
            **outcome,
        )


def _judge(model_type: str, directory: Path, impl: str) -> dict[str, Any]:
    if (reason := _refusal_by_type(model_type)) is not None:
        return {"verdict": "refused", "reason": reason}
    model = make_model(model_type, directory)
    config = json.loads((directory / "config.json").read_text())
    architecture = (architectures_of(config) or [type(model).__name__])[0]
    ours = impl != "transformers" and find_family(config) is not None and not is_foreign(config)
    facts = {"architecture": architecture, "implementation": "pagoda" if ours else "transformers"}
    prompts = make_prompts()
    for budget in (2048, CHUNK):
        try:
            results = asyncio.run(_generate(directory, prompts, budget, impl))
        except Refused as error:
            reason = str(error)
            return facts | {"verdict": "refused", "implementation": "", "reason": reason}
        for prompt, (tokens, logprobs) in results:
            problem = _compare(model, prompt, tokens, logprobs)
            if problem:
                return facts | {"verdict": "wrong", "reason": f"budget {budget}, {len(prompt)} tokens: {problem}"}
    return facts | asdict(abilities_of(directory, model)) | {"verdict": "exact"}


def _refusal_by_type(model_type: str) -> str | None:
    """Why a recurrent type is refused, of many of which nothing tiny can be made; None: another type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    config = {"model_type": model_type, "architectures": [model_class.__name__]}
    if not getattr(model_class, "_is_stateful", False) or find_family(config) is not None:
        return None
    try:
        ModelBuilder(config=BuildConfig(checkpoint=config), parallel=ALONE).build()
    except ModelLoadError as error:
        return error.message
    return None


def make_model(model_type: str, directory: Path) -> Any:
    """Write a random checkpoint, and give the model that transformers reads from it."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(TEXT_PARTS.get(model_type, model_type))
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} M parameters are not tiny")
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            initialise(name, parameter, generator)
    model.save_pretrained(directory)
    if model_type in TEXT_PARTS:
        write_as_text_part(directory, MODEL_TYPES[model_type], model_type)
    return model


def initialise(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Weights so large that greedy outputs vary, and that an error of attention shows in them."""
    noise = parameter.new_empty(parameter.shape).normal_(generator=generator)
    if parameter.dim() <= 1:
        parameter.add_(0.1 * noise)
    elif any(part in name for part in ("embed", "wte", "wpe", "lm_head", "word_emb")):
        parameter.copy_(0.5 * noise)
    else:
        parameter.copy_(noise * 1.5 / math.sqrt(parameter.shape[-1]))


def make_prompts() -> list[list[int]]:
    """Random tokens; none that are special."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(10, VOCAB_SIZE - 10, (length,), generator=generator).tolist() for length in LENGTHS]


class Refused(Exception):
    """The model cannot be loaded."""


async def _generate(
    directory: Path, prompts: list[list[int]], budget: int, impl: str
) -> list[tuple[list[int], tuple[list[int], list[float]]]]:
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype="float32", device="cpu", model_impl=impl),  # type: ignore[arg-type]
        cache=CacheConfig(block_size=16, num_blocks_override=200, kv_cache_memory_bytes=1 << 28),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget),
    )
    _check_loads(config)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True)
    results = []
    async with running_engine(config) as engine:
        for turn in range(2):
            outputs = await asyncio.gather(
                *(engine.generate(f"{turn}-{i}", prompt, params) for i, prompt in enumerate(prompts))
            )
            for prompt, news in zip(prompts, outputs, strict=True):
                tokens = [token for output in news for token in output.token_ids]
                values = [value for output in news for value in _logprobs(output)]
                results.append((prompt, (tokens, values)))
    return results


def _check_loads(config: EngineConfig) -> None:
    worker = Worker(num_threads=1)
    try:
        worker.init_device(config, takes_cache_groups=True)
        worker.load_model(lambda loaded, total: None)
    except PagodaError as error:
        if os.environ.get("SWEEP_DEBUG") and error.__cause__ is not None:
            cause = error.__cause__.__cause__ or error.__cause__
            traceback.print_exception(cause, limit=-8)
        raise Refused(error.message) from error


def _logprobs(output: Any) -> list[float]:
    return [float(entry.logprobs[0]) for entry in output.logprobs or []]


@torch.inference_mode()
def _compare(model: Any, prompt: list[int], tokens: list[int], logprobs: list[float]) -> str:
    """What differs; empty: nothing."""
    if len(tokens) != NUM_TOKENS:
        return f"{len(tokens)} tokens"
    logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    rows = logits.log_softmax(-1)
    for index, token in enumerate(tokens):
        best = float(rows[index].max())
        if best - float(rows[index, token]) > TOLERANCE:
            return f"token {index} is {token}, transformers' is {int(rows[index].argmax())}"
        if logprobs and abs(logprobs[index] - float(rows[index, token])) > TOLERANCE:
            return f"log probability {index} is {logprobs[index]:.4f}, transformers' is {float(rows[index, token]):.4f}"
    return ""


def _too_long(number: int, frame: Any) -> None:
    raise TimeoutError(f"takes more than {MAX_SECONDS} s")


def main() -> None:
    """Print a line a type, and counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="*")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--impl", default="auto")
    arguments = parser.parse_args()
    signal.signal(signal.SIGALRM, _too_long)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    counts: Counter[str] = Counter()
    for outcome in sweep(arguments.types or model_types(), arguments.impl):
        counts[outcome.verdict] += 1
        if arguments.json:
            print(json.dumps(asdict(outcome)), flush=True)
        else:
            print(
                f"{outcome.verdict:8} {outcome.model_type:24} {outcome.implementation:12} {outcome.seconds:5.1f} s  "
                f"{outcome.reason}",
                flush=True,
            )
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()), file=sys.stderr)


if __name__ == "__main__":
    main()
