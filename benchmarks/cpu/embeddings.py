"""Embeddings of many texts beside other engines, on this machine's cores.

    python benchmarks/cpu/peers.py sentence-transformers onnxruntime openvino vllm       # once
    python benchmarks/cpu/embeddings.py --shapes bge-small bge-base --json OUT.jsonl

2,000 texts of 10 to 300 tokens, tokenization included, through a BERT of the shape with random weights, mean pooling
and normalisation. Engines run one after the other, each in an environment of its own (--peers-dir); what is not
installed is left out and said. Before the first time each runs 128 texts. Vectors are compared: the cosine to Pagoda's
is printed.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # so that it also runs as a plain script

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from benchmarks.tools.figures import machine

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_PEERS = Path.home() / ".cache/pagoda/peers"
SHAPES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
    "bge-small": {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 1536},
    "bge-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
VOCABULARY = 30_522
PEERS = ("sentence-transformers", "onnxruntime", "openvino", "vllm")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


@dataclass(frozen=True, slots=True)
class Measured:
    """One engine's."""

    seconds: list[float]
    first: list[list[float]]


def make_checkpoint(directory: Path, shape: dict[str, int]) -> None:
    """A BERT of random weights whose tokenizer has a token for each word."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=512, **shape)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    model.bfloat16().save_pretrained(directory)
    words = [*SPECIAL, *(f"w{number}" for number in range(VOCABULARY - len(SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_max_length=512,
    ).save_pretrained(directory)
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    for path, _ in kinds[1:]:
        (directory / path).mkdir()
    pooling = {"word_embedding_dimension": shape["hidden_size"], "pooling_mode_mean_tokens": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512}))


def make_texts(count: int) -> list[str]:
    """Of 10 to 300 tokens, special ones included."""
    draw = random.Random(7)
    lengths = [draw.randint(10, 300) - 2 for _ in range(count)]
    most = VOCABULARY - len(SPECIAL)
    return [" ".join(f"w{draw.randrange(most)}" for _ in range(length)) for length in lengths]


def measure(engine: str, model: Path, texts: Path, args: argparse.Namespace) -> Measured | str:
    """What an engine took, or why it did not run."""
    is_ours = engine.startswith("pagoda")
    python = Path(sys.executable) if is_ours else args.peers_dir / engine / "venv/bin/python"
    if not python.exists():
        return f"not installed (python benchmarks/cpu/peers.py {engine})"
    script = [str(python), str(ROOT / "benchmarks/cpu/embedding_engines.py"), engine, str(model), str(texts)]
    options = ["--dtype", args.dtype, "--threads", str(args.threads), "--rounds", str(args.rounds)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(args.threads)}
    if not is_ours:
        env.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            [*script, *options], env=env, capture_output=True, text=True, timeout=args.timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"took more than {args.timeout_s} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if done.returncode or not lines:
        return " | ".join(done.stderr.strip().splitlines()[-2:])[-300:] or f"ended with code {done.returncode}"
    return Measured(**json.loads(lines[-1]))


def cosine(one: list[list[float]], other: list[list[float]]) -> float:
    """The smallest of two lists of vectors."""
    import numpy as np

    a, b = np.array(one), np.array(other)
    return float(((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min())


def run_shape(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and print one shape; a record an engine."""
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model, texts = Path(folder) / "model", Path(folder) / "texts.json"
        model.mkdir()
        make_checkpoint(model, SHAPES[name])
        given = make_texts(args.num_texts)
        texts.write_text(json.dumps(given), encoding="utf-8")
        num_tokens = sum(len(text.split()) + 2 for text in given)
        print(f"\n{name}, {args.dtype}, {args.num_texts} texts of {num_tokens} tokens, {args.threads} threads")
        ours: Measured | None = None
        for engine in ("pagoda", "pagoda-http", *args.peers):
            found = measure(engine, model, texts, args)
            if isinstance(found, str):
                print(f"  {engine:22} {found}")
                continue
            ours = ours or found
            median = statistics.median(found.seconds)
            spread = max(found.seconds) / min(found.seconds)
            alike = cosine(ours.first, found.first)
            ratio = median / statistics.median(ours.seconds)
            rates = f"{args.num_texts / median:7.1f} texts/s  {num_tokens / median:9.0f} tok/s"
            print(
                f"  {engine:22} {median:8.2f} s  {rates}"
                f"  {ratio:5.2f} x pagoda  spread {spread:.2f}  cosine {alike:.5f}"
            )
            record = {"name": f"{name} {args.dtype} {args.num_texts} texts, {engine}", "value": round(median, 6)}
            record |= {"unit": "s", "n": len(found.seconds), "machine": machine()}
            records.append(record | {"date": datetime.now(UTC).date().isoformat()})
    return records


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["bge-small", "bge-base"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_PEERS, metavar="DIR")
    parser.add_argument("--num-texts", type=int, default=2000, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--timeout-s", type=float, default=1800.0, metavar="S", help="for one engine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a line for each engine and shape")
    args = parser.parse_args()
    for name in args.shapes:
        records = run_shape(name, args)
        if args.json is not None:
            with args.json.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
