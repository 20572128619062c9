"""Every family under every circumstance, tiny and random: the tokens stay those of transformers.

    python -m tests.models.circumstances [--families Zamba2ForCausalLM apertus] [--without-processes]

A family is an architecture of tests/small_models, or a model type that transformers computes. Each is served whole,
in chunks and with its prefix cached; preempted by recomputation and by swaps; with drafts; forked into three; as beams;
with an int8 cache; on two ranks; and as processes of which the worker and then the scheduler are killed, after a sleep
between. Families that keep states alone are preempted by urgent sequences: no blocks can run out. The tests of
tests/exactness and tests/process do so to some; this program to all.
"""

import argparse
import asyncio
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from pagoda_common.errors import ConfigError
from tests.checkpoints import CONFIGS, make_checkpoint, write_tokenizer
from tests.exactness import test_cache_groups as exactness
from tests.exactness import test_recurrent_alone as alone
from tests.exactness.conftest import NUM_TOKENS, Reference, make_prompts
from tests.models.sweep import make_model
from tests.process.failures import test_cache_groups as processes
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import greedy

FAMILIES = (
    *("Qwen3MoeForCausalLM", "MixtralForCausalLM", "Glm4MoeForCausalLM", "MiniMaxM2ForCausalLM", "Llama4ForCausalLM"),
    *("GptOssForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM"),
    *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "NemotronHForCausalLM", "GraniteMoeHybridForCausalLM"),
    *("FalconH1ForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Gemma3nForCausalLM", "Gemma4ForCausalLM"),
    *("MiniCPM3ForCausalLM", "Exaone4ForCausalLM", "JambaForCausalLM", "BambaForCausalLM", "Zamba2ForCausalLM"),
    "DeciLMForCausalLM",
    *("ExaoneForCausalLM", "InternLM3ForCausalLM", "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "apertus"),
    *alone.FAMILIES,
)
ON_ONE_RANK = ("Zamba2ForCausalLM",)
NUM_PROMPTS = 18
MANY_TOKENS = 3000
"""Of streams of states alone: a step of theirs is soon done, and they have room for more than other tiny models."""


def reference_of(family: str, directory: Path) -> Reference:
    """Prompts, and what transformers says to each."""
    if family in CONFIGS:
        make_checkpoint(family, directory)
    else:
        make_model(family, directory)
        write_tokenizer(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompts = make_prompts(model.config.vocab_size)[:NUM_PROMPTS]
    guesses = Driver(directory).generate(prompts, max_tokens=NUM_TOKENS)
    outputs = [greedy(model, prompt, guess.output) for prompt, guess in zip(prompts, guesses, strict=True)]
    return Reference(directory, prompts, outputs, [])


async def on_two_ranks(family: Reference) -> None:
    """Their tokens, in chunks."""
    if any(name in str(family.directory) for name in ON_ONE_RANK):
        try:
            Driver(family.directory, world_size=2)
        except ConfigError:
            return
        raise AssertionError("two ranks were not refused")
    sequences = Driver(family.directory, world_size=2).generate(family.prompts, max_tokens=NUM_TOKENS, chunk=100)
    assert [sequence.output for sequence in sequences] == family.outputs


async def drafts(family: Reference) -> None:
    """Whether any was right depends on the text."""
    async with exactness.running_engine(exactness.make_config(family, speculative=exactness.DRAFTS)) as engine:
        assert await engine.all_tokens(family.prompts, exactness.GREEDY) == family.outputs
        assert engine.client.load.speculation.num_draft_tokens > 0


async def as_processes(family: Reference, num_tokens: int) -> None:
    """Two streams, under which the worker is killed, all sleeps and wakes, and the scheduler is killed."""
    with processes.serving(family.directory) as stack:
        processes.check_streams(stack, num_tokens)


def circumstances(family: str) -> Iterator[tuple[str, Callable[[Reference], Awaitable[None]]]]:
    """By name."""
    has_blocks = family not in alone.FAMILIES
    preempt = exactness.test_under_preemption if has_blocks else alone.test_under_preemption
    yield "whole, and with a prefix that is there", exactness.test_alone_and_all_at_once
    for mode, settings in (("recompute", exactness.RECOMPUTE), ("swap", exactness.SWAP)):
        for _, *options in settings:
            yield (
                f"preempted by {mode}, {options}",
                lambda reference, mode=mode, options=options: preempt(reference, mode, *options),
            )
    yield "with drafts", drafts
    yield "forked", exactness.test_siblings_fork_and_part
    yield "as beams", exactness.test_beams_find_the_hypotheses_of_transformers
    of_int8 = exactness.test_an_int8_cache_gives_the_same_tokens_however_they_come_about
    yield "with an int8 cache", of_int8 if has_blocks else alone.test_an_int8_cache_changes_nothing
    yield "on two ranks", on_two_ranks
    num_tokens = processes.NUM_TOKENS if has_blocks else MANY_TOKENS
    yield "as processes", lambda reference: as_processes(reference, num_tokens)


def run(family: str, *, has_processes: bool) -> list[str]:
    """The circumstances that it did not stand."""
    failed = []
    with tempfile.TemporaryDirectory(prefix=f"{family}-") as directory:
        reference = reference_of(family, Path(directory))
        for name, holds in circumstances(family):
            if name == "as processes" and not has_processes:
                continue
            started = time.monotonic()
            try:
                asyncio.run(_awaited(holds, reference))
            except Exception:
                traceback.print_exc()
                failed.append(name)
            verdict = "FAILS" if name in failed else "holds"
            print(f"{family}: {verdict}, {time.monotonic() - started:.0f} s: {name}", flush=True)
    return failed


async def _awaited(holds: Callable[[Reference], Awaitable[None]], reference: Reference) -> None:
    await holds(reference)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--without-processes", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    failed = {family: run(family, has_processes=not options.without_processes) for family in options.families}
    print({family: names for family, names in failed.items() if names} or "all hold")
    sys.exit(any(failed.values()))


if __name__ == "__main__":
    main()
