"""Prompts for benchmarks out of texts: lines of a poem (sonnet), or the rows of a dataset in a local folder (hf)."""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from pagoda.bench.requests import SampleRequest, oversample, read_file
from pagoda_common.errors import ConfigError
from pagoda_common.text.tokenizer import Tokenizer

SONNET_HEAD = "Pick as many lines as you can from these poem lines:\n"
PROMPT_COLUMNS = ("prompt", "question", "instruction", "text", "input", "problem", "article")
"""Columns that hold a prompt, the first that is there."""
TURN_COLUMNS = ("conversations", "messages", "turns", "conversation")
"""Columns that hold a conversation, whose first turn is the prompt."""
SUFFIXES = (".jsonl", ".json")


def add_text_arguments(group: Any) -> None:
    """The flags of both, with vLLM's names and defaults."""
    for name, default, text in (("input", 550, "of a prompt"), ("output", 150, "of an answer")):
        group.add_argument(
            f"--sonnet-{name}-len", type=int, default=default, metavar="TOKENS", help=f"{text} (default: %(default)s)"
        )
    group.add_argument(
        "--sonnet-prefix-len",
        type=int,
        default=200,
        metavar="TOKENS",
        help="of the lines that all prompts begin with (default: %(default)s)",
    )
    group.add_argument(
        "--hf-output-len", type=int, default=256, metavar="TOKENS", help="of an answer (default: %(default)s)"
    )


def sonnet_requests(
    args: argparse.Namespace, tokenizer: Tokenizer, num_prompts: int, draw: random.Random
) -> list[SampleRequest]:
    """Lines of the file at random, as many as fit, after the same first ones."""
    lines = [line + "\n" for line in read_file(args).splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{args.dataset_path} has no line", field="dataset_path")
    if not 0 <= args.sonnet_prefix_len <= args.sonnet_input_len:
        raise ConfigError(
            f"sonnet_prefix_len is {args.sonnet_prefix_len}, must be in [0, sonnet_input_len]",
            field="sonnet_prefix_len",
        )
    sizes = [len(tokenizer.encode(line, add_special_tokens=False)) for line in lines]
    mean = sum(sizes) / len(sizes)
    head = len(tokenizer.encode(SONNET_HEAD))
    num_lines = round((args.sonnet_input_len - head) / mean)
    num_shared = max(0, round((args.sonnet_prefix_len - head) / mean))
    if num_lines < 1:
        raise ConfigError(
            f"sonnet_input_len is {args.sonnet_input_len}, must leave room for a line after {head} tokens",
            field="sonnet_input_len",
        )
    shared = "".join(lines[:num_shared])
    requests = []
    for _ in range(num_prompts):
        prompt = SONNET_HEAD + shared + "".join(draw.choices(lines, k=max(0, num_lines - num_shared)))
        requests.append(SampleRequest(prompt, len(tokenizer.encode(prompt)), args.sonnet_output_len))
    return requests


def hf_requests(
    args: argparse.Namespace, tokenizer: Tokenizer, num_prompts: int, draw: random.Random
) -> list[SampleRequest]:
    """The prompts of the JSON or JSONL files of a local folder, or of one such file."""
    if args.dataset_path is None:
        raise ConfigError("--dataset-name hf needs --dataset-path, a local file or folder", field="dataset_path")
    path = Path(args.dataset_path)
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES) if path.is_dir() else [path]
    try:
        rows = [row for file in files for row in _rows(file)]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the dataset: {error}", field="dataset_path") from None
    prompts = [prompt for row in rows if (prompt := _prompt_of(row))]
    if not args.disable_shuffle:
        draw.shuffle(prompts)
    chosen = prompts[:num_prompts]
    requests = [SampleRequest(prompt, len(tokenizer.encode(prompt)), args.hf_output_len) for prompt in chosen]
    return oversample(requests, args, num_prompts, draw)


def _rows(file: Path) -> list[Any]:
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".json":
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    content = json.loads(text)
    return content if isinstance(content, list) else []


def _prompt_of(row: Any) -> str | None:
    if not isinstance(row, dict):
        return None
    for name in PROMPT_COLUMNS:
        if isinstance(row.get(name), str) and row[name].strip():
            return str(row[name])
    for name in TURN_COLUMNS:
        turns = row.get(name)
        first = turns[0] if isinstance(turns, list) and turns else None
        text = first if isinstance(first, str) else None
        if isinstance(first, dict):
            text = first.get("value", first.get("content"))
        if isinstance(text, str) and text.strip():
            return text
    return None
