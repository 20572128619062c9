"""Tokens a second with and without drafts, on a text that is asked for again, one that is nearly, and a random one.

The model has the Llama 125M shape and does all of its work, but its layers add nothing, so that what it says is known:
each token has one successor, which it takes with probability 0.8 at temperature 1, or continues elsewhere in its text.
Prompts go along the successors, so the loads are three temperatures:

- copy (0): every token is as in the prompt;
- edit (1): four of five are;
- random (2): few are.

    python benchmarks/cpu/speculation.py --json benchmarks/results/speculation.jsonl
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # so that it also runs as a plain script

import argparse
import json
import math
import tempfile
import time
from dataclasses import dataclass

import torch
from safetensors.torch import save_file

from benchmarks.tools.figures import Report, median, parser
from pagoda import LLM, SamplingParams
from pagoda.llm.metrics import Counter
from tests.checkpoints import write_tokenizer

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PERIOD = 96
"""Tokens until a text begins again."""
COPY_PROBABILITY = 0.8
SHARED = 0.6
"""Of an embedding's square: what tokens of one text have in common, so that they are likelier after one another."""
LOADS = {"copy": 0.0, "edit": 1.0, "random": 2.0}
"""Temperatures."""


def write_model(directory: Path) -> None:
    """A checkpoint whose next token is mostly the last one's successor: the next of its text, round and round."""
    generator = torch.Generator().manual_seed(0)
    vocab_size, hidden, inner = SHAPE["vocab_size"], SHAPE["hidden_size"], SHAPE["intermediate_size"]
    assert isinstance(vocab_size, int)
    assert isinstance(hidden, int)
    assert isinstance(inner, int)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    num_texts = -(-vocab_size // PERIOD)
    own, common = normal(num_texts * PERIOD, hidden), normal(num_texts, hidden).repeat_interleave(PERIOD, dim=0)
    embeddings = ((1 - SHARED) ** 0.5 * own + SHARED**0.5 * common)[:vocab_size].to(torch.bfloat16)
    successors = torch.arange(vocab_size)
    successors = successors // PERIOD * PERIOD + (successors + 1) % PERIOD
    # Logits are about `peak` for the successor, SHARED * peak for other tokens of the text, and 0 for the rest.
    peak, odds = 0.0, (1 - COPY_PROBABILITY) / COPY_PROBABILITY
    while odds * math.exp(peak) < PERIOD * math.exp(SHARED * peak) + vocab_size:
        peak += 0.01
    scale = peak / hidden
    head = torch.empty_like(embeddings)
    head[successors.clamp(max=vocab_size - 1)] = embeddings * scale
    tensors = {
        "model.embed_tokens.weight": embeddings,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    shapes = {"q_proj": (hidden, hidden), "k_proj": (hidden, hidden), "v_proj": (hidden, hidden)}
    for layer in range(int(str(SHAPE["num_hidden_layers"]))):
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            tensors[f"{prefix}self_attn.{name}.weight"] = (0.02 * normal(*shape)).to(torch.bfloat16)
        tensors[prefix + "self_attn.o_proj.weight"] = torch.zeros(hidden, hidden, dtype=torch.bfloat16)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{prefix}mlp.{name}.weight"] = (0.02 * normal(inner, hidden)).to(torch.bfloat16)
        tensors[prefix + "mlp.down_proj.weight"] = torch.zeros(hidden, inner, dtype=torch.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors")
    write_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(SHAPE))


@dataclass(frozen=True)
class Round:
    """One measurement."""

    tokens_per_s: float
    num_draft_tokens: int
    num_accepted_tokens: int


def counter(llm: LLM, name: str) -> int:
    """A counter of the engine; 0 where it has none."""
    return sum(metric.value for metric in llm.get_metrics() if isinstance(metric, Counter) and metric.name == name)


def measure(llm: LLM, *, temperature: float, num_streams: int, num_tokens: int, seed: int) -> Round:
    """Prompts of 128 tokens, each of a text of its own, and their continuations."""
    prompts = [
        {"prompt_token_ids": [PERIOD * (10 + 40 * seed + number) + place % PERIOD for place in range(128)]}
        for number in range(num_streams)
    ]
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=num_tokens, ignore_eos=True, detokenize=False
    )
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    before = [counter(llm, name) for name in names]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - started
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    drafts = [counter(llm, name) - start for name, start in zip(names, before, strict=True)]
    return Round(num_streams * num_tokens / elapsed, *drafts)


def main(args: argparse.Namespace) -> None:
    """Both engines take turns at going first, so that neither has the better minutes."""
    report = Report(args.json)
    config = {"method": "ngram", "num_speculative_tokens": args.tokens, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        options = {"model": name, "dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 32}
        plain, guessing = LLM(**options), LLM(**options, speculative_config=config)
        for load in args.loads:
            temperature = LOADS[load]
            for num_streams in args.streams:
                shape = {"temperature": temperature, "num_streams": num_streams, "num_tokens": args.num_tokens}
                rounds: list[tuple[Round, Round]] = []
                for seed in range(args.rounds + 1):  # the first one warms up
                    order = (plain, guessing) if seed % 2 else (guessing, plain)
                    measured = {llm: measure(llm, **shape, seed=seed) for llm in order}
                    rounds.append((measured[plain], measured[guessing]))
                del rounds[0]
                without, with_drafts = (median([each[side].tokens_per_s for each in rounds]) for side in (0, 1))
                tried = sum(guessed.num_draft_tokens for _, guessed in rounds)
                right = sum(guessed.num_accepted_tokens for _, guessed in rounds)
                what = f"speculation {load} {num_streams} streams"
                report.add(f"{what} plain", without, "tokens/s", n=len(rounds))
                report.add(f"{what} ngram", with_drafts, "tokens/s", n=len(rounds))
                report.add(f"{what} speedup", with_drafts / without, "x", n=len(rounds))
                report.add(f"{what} accepted", right / tried if tried else 0.0, "of draft tokens", n=tried)
                num_tokens = num_streams * args.num_tokens * len(rounds)
                report.add(f"{what} drafted", tried / num_tokens, "draft tokens a token", n=tried)


if __name__ == "__main__":
    flags = parser(__doc__ or "")
    flags.add_argument("--streams", type=int, nargs="+", default=[1, 8], metavar="N", help="streams at a time")
    flags.add_argument("--loads", nargs="+", default=list(LOADS), choices=LOADS, help="kinds of text")
    flags.add_argument("--tokens", type=int, default=4, metavar="N", help="num_speculative_tokens")
    flags.add_argument("--num-tokens", type=int, default=128, metavar="N", help="output tokens of each stream")
    main(flags.parse_args())
