"""What quantization costs in quality: perplexity of a model on a text, and how far log probabilities move, by scheme.

    python benchmarks/cpu/kernels/quantization_error.py --json benchmarks/results/quantization_error.jsonl

Unless --model and --text say otherwise: the embedded model, on the stories that it tells itself without quantization
(temperature 1, seeds fixed), so that the perplexity of float32 is that of the model's own distribution.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))  # so that it also runs as a plain script

import math

import torch

from benchmarks.tools.figures import Report, parser
from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.sampling.grammars import load_tokenizer
from tests.unit.worker.driver import Driver

SCHEMES = ("int8", "int8-g128", "int8-g32", "int4-g128", "int4-g64", "int4-g32")
KINDS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    **{
        f"{scheme}{name}": {"dtype": dtype, "quantization": scheme, "activation_quantization": activations}
        for scheme in SCHEMES
        for name, dtype, activations in (
            (" in float32", "float32", "none"),
            (" in bfloat16", "bfloat16", "none"),
            (" with inputs of 8 bits", "bfloat16", "auto"),
        )
    },
}
"""What is measured, and the options that it is served with."""
NUM_TEXTS, NUM_TOKENS = 24, 200


def texts(driver: Driver) -> list[list[int]]:
    """Token ids."""
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=NUM_TOKENS) for seed in range(NUM_TEXTS)]
    sequences = driver.generate([[0] for _ in params], params, max_tokens=NUM_TOKENS)
    return [sequence.prompt + sequence.output for sequence in sequences]


def logprobs(driver: Driver, prompts: list[list[int]]) -> torch.Tensor:
    """Of every token but the first of each text."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    sequences = driver.generate(prompts, params, max_tokens=1, budget=2048)
    return torch.cat([torch.as_tensor(chunk.logprobs.logprobs) for one in sequences for chunk in one.prompt_logprobs])


def main() -> None:
    """Command line."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--model", default=EMBEDDED_MODEL, help="directory or hub id")
    arguments.add_argument("--text", type=Path, metavar="PATH", help="a text to read, instead of the model's own")
    args = arguments.parse_args()
    report = Report(args.json)
    exact = Driver(args.model, dtype="float32")
    if args.text is None:
        prompts = texts(exact)
    else:
        ids = load_tokenizer(args.model, revision=None).encode(args.text.read_text()).ids
        prompts = [ids[start : start + NUM_TOKENS] for start in range(0, len(ids) - 1, NUM_TOKENS)]
    expected = logprobs(exact, prompts)
    for kind, options in KINDS.items():
        driver = Driver(args.model, **options)
        found = logprobs(driver, prompts)
        n = len(found)
        report.add(f"{kind} perplexity", math.exp(-float(found.mean())), "", n=n)
        report.add(f"{kind} error of logprobs", float((found - expected).abs().mean()), "nats", n=n)
        report.add(f"{kind} weights", driver.facts.weight_bytes / 2**20, "MiB", n=1)


if __name__ == "__main__":
    main()
