"""SampleRequest: one request of a benchmark, and what all files of prompts have in common."""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

from pagoda_common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One request of a benchmark."""

    prompt: str
    prompt_len: int
    """Tokens of the prompt, as this machine's tokenizer counts them."""
    output_len: int
    """Maximum number of tokens to generate."""


def read_file(args: argparse.Namespace) -> str:
    """The text of --dataset-path.

    Raises:
        ConfigError: it is not given, or cannot be read.
    """
    if args.dataset_path is None:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path", field="dataset_path")
    try:
        return Path(args.dataset_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the dataset: {error}", field="dataset_path") from None


def oversample(
    requests: list[SampleRequest], args: argparse.Namespace, num_prompts: int, draw: random.Random
) -> list[SampleRequest]:
    """`requests`, some of them again where there are too few.

    Raises:
        ConfigError: there is none.
    """
    if not requests:
        raise ConfigError(f"{args.dataset_path} has no usable prompt", field="dataset_path")
    if args.no_oversample or len(requests) >= num_prompts:
        return requests
    return requests + draw.choices(requests, k=num_prompts - len(requests))
