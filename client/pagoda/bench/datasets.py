"""Prompts for benchmarks: random tokens, ShareGPT, a poem, a local dataset, a file of one's own. Flags are vLLM's."""

import argparse
import json
import random
from collections.abc import Callable
from typing import Any

from pagoda.bench.requests import SampleRequest, oversample, read_file
from pagoda.bench.text_datasets import add_text_arguments, hf_requests, sonnet_requests
from pagoda_common.errors import ConfigError
from pagoda_common.text.tokenizer import Tokenizer

NUM_ROUNDS = 16
"""Attempts at a random text that has exactly the wanted number of tokens; the last one is taken as it is."""
TOKENIZER_MARGIN = 8
"""Tokens that a random text may have more than was wanted, and those that the server puts before it."""
SHAREGPT_MIN_TOKENS = 4
SHAREGPT_MAX_PROMPT_TOKENS = 1024
SHAREGPT_MAX_TOKENS = 2048
"""ShareGPT conversations outside of these are left out, as everybody does who publishes figures for it."""


def add_dataset_arguments(parser: argparse.ArgumentParser, *, input_len: int = 1024, output_len: int = 128) -> None:
    """The flags that `read_dataset` reads, but --num-prompts and --seed.

    Args:
        input_len, output_len: defaults for random prompts, in tokens.
    """
    group = parser.add_argument_group("dataset")
    group.add_argument("--dataset-name", choices=DATASETS, default="random", help="(default: %(default)s)")
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        help="file of a sharegpt (JSON), custom (JSONL) or sonnet (text) dataset; of hf a file or folder of JSON",
    )
    group.add_argument(
        *("--random-input-len", "--input-len"),
        type=int,
        default=input_len,
        metavar="TOKENS",
        help="of random prompts (default: %(default)s)",
    )
    group.add_argument(
        *("--random-output-len", "--output-len"),
        type=int,
        default=output_len,
        metavar="TOKENS",
        help="of random requests (default: %(default)s)",
    )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="lengths are even between (1 - R) and (1 + R) times the above (default: %(default)s)",
    )
    group.add_argument(
        "--random-prefix-len", type=int, default=0, metavar="TOKENS", help="begin of all random prompts, on top"
    )
    group.add_argument("--sharegpt-output-len", type=int, metavar="TOKENS", help="in place of the answers' lengths")
    group.add_argument(
        "--custom-output-len",
        type=int,
        default=256,
        metavar="TOKENS",
        help="of a custom dataset; -1 takes each line's output_tokens (default: %(default)s)",
    )
    add_text_arguments(group)
    group.add_argument("--skip-chat-template", action="store_true", help="send a custom dataset's prompts as they are")
    group.add_argument("--disable-shuffle", action="store_true", help="take the file in its order")
    group.add_argument("--no-oversample", action="store_true", help="do not repeat a file's prompts to --num-prompts")


def read_dataset(args: argparse.Namespace, tokenizer: Tokenizer, *, num_prompts: int) -> list[SampleRequest]:
    """The requests that the flags ask for; the same ones for the same --seed.

    Raises:
        ConfigError: a length is out of bounds, or the file is not as it must be.
    """
    return DATASETS[args.dataset_name](args, tokenizer, num_prompts, random.Random(args.seed))


def fit_random_lengths(args: argparse.Namespace, max_model_len: int | None) -> str:
    """Shorten the default of --random-input-len to the server's context; what to tell, empty if it fits.

    Args:
        max_model_len: longest prompt plus output in tokens; None if the server does not tell.
    """
    if args.dataset_name != "random" or max_model_len is None:
        return ""
    longest = 1 + args.random_range_ratio
    room = max_model_len - args.random_prefix_len - TOKENIZER_MARGIN - int(args.random_output_len * longest)
    fitting = int(room / longest)
    if fitting < 1 or fitting >= args.random_input_len:
        return ""
    args.random_input_len = fitting
    return f"random prompts have {fitting} tokens, so that they fit the server's context of {max_model_len}"


def random_requests(
    args: argparse.Namespace, tokenizer: Tokenizer, num_prompts: int, draw: random.Random
) -> list[SampleRequest]:
    """Texts of random ordinary tokens."""
    ratio = args.random_range_ratio
    for name, value, low in (
        ("random_input_len", args.random_input_len, 1),
        ("random_output_len", args.random_output_len, 1),
        ("random_prefix_len", args.random_prefix_len, 0),
    ):
        if value < low:
            raise ConfigError(f"{name} is {value}, must be at least {low}", field=name)
    if not 0 <= ratio < 1:
        raise ConfigError(f"random_range_ratio is {ratio}, must be in [0, 1)", field="random_range_ratio")
    vocabulary = ordinary_token_ids(tokenizer)
    # What the server puts before the text is part of the wanted length.
    num_special = len(tokenizer.encode("a")) - len(tokenizer.encode("a", add_special_tokens=False))
    prefix = draw.choices(vocabulary, k=args.random_prefix_len)

    def length(mean: int) -> int:
        return max(1, draw.randint(int(mean * (1 - ratio)), int(mean * (1 + ratio))))

    requests = []
    for _ in range(num_prompts):
        wanted = max(1, len(prefix) + length(args.random_input_len) - num_special)
        prompt, num_tokens = random_text(tokenizer, vocabulary, wanted, draw, prefix=prefix)
        requests.append(SampleRequest(prompt, num_tokens + num_special, length(args.random_output_len)))
    return requests


def ordinary_token_ids(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are whole characters and not special: most of them survive being made text and read again."""
    special = set(tokenizer.special_tokens.values())
    ids = []
    for token_id in range(tokenizer.vocab_size):
        text = (tokenizer.token_bytes(token_id) or b"\xff").decode(errors="replace")
        if text.isprintable() and text not in special and "�" not in text and "<|" not in text:
            ids.append(token_id)
    return ids or list(range(tokenizer.vocab_size))


def random_text(
    tokenizer: Tokenizer, vocabulary: list[int], num_tokens: int, draw: random.Random, *, prefix: list[int]
) -> tuple[str, int]:
    """A text of `num_tokens` tokens that begins with `prefix`, and how many it really has."""
    ids = prefix + draw.choices(vocabulary, k=num_tokens - len(prefix))
    for _ in range(NUM_ROUNDS):
        text = tokenizer.decode(ids)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == num_tokens:
            break
        ids = ids[:num_tokens] + draw.choices(vocabulary, k=max(0, num_tokens - len(ids)))
    return text, len(tokenizer.encode(text, add_special_tokens=False))


def sharegpt_requests(
    args: argparse.Namespace, tokenizer: Tokenizer, num_prompts: int, draw: random.Random
) -> list[SampleRequest]:
    """The first question of each conversation; the length of its answer is the output's."""
    content = read_file(args)
    try:
        turns = [entry.get("conversations") or [] for entry in json.loads(content)]
        pairs = [(turn[0]["value"], turn[1]["value"]) for turn in turns if len(turn) >= 2]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        message = f"{args.dataset_path} is not a JSON list of conversations: {error!r}"
        raise ConfigError(message, field="dataset_path") from None
    if not args.disable_shuffle:
        draw.shuffle(pairs)
    requests: list[SampleRequest] = []
    for prompt, answer in pairs:
        if len(requests) == num_prompts:
            break
        num_tokens = len(tokenizer.encode(prompt))
        output_len = args.sharegpt_output_len or len(tokenizer.encode(answer, add_special_tokens=False))
        is_short = num_tokens < SHAREGPT_MIN_TOKENS or output_len < SHAREGPT_MIN_TOKENS
        is_long = num_tokens > SHAREGPT_MAX_PROMPT_TOKENS or num_tokens + output_len > SHAREGPT_MAX_TOKENS
        if not (is_short or is_long):
            requests.append(SampleRequest(prompt, num_tokens, output_len))
    return oversample(requests, args, num_prompts, draw)


def custom_requests(
    args: argparse.Namespace, tokenizer: Tokenizer, num_prompts: int, draw: random.Random
) -> list[SampleRequest]:
    """Lines {"prompt": …, "output_tokens": …}; prompts are made a conversation where the tokenizer can."""
    content = read_file(args)
    try:
        lines = [json.loads(line) for line in content.splitlines() if line.strip()]
        prompts = [str(line["prompt"]) for line in lines]
        lengths = [args.custom_output_len if args.custom_output_len != -1 else int(x["output_tokens"]) for x in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{args.dataset_path}: a line is not as it must be: {error!r}", field="dataset_path"
        ) from None
    if not args.skip_chat_template and tokenizer.has_chat_template and getattr(args, "backend", None) != "openai-chat":
        prompts = [tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) for prompt in prompts]
    pairs = list(zip(prompts, lengths, strict=True))
    if not args.disable_shuffle:
        draw.shuffle(pairs)
    requests = [SampleRequest(prompt, len(tokenizer.encode(prompt)), n) for prompt, n in pairs[:num_prompts]]
    return oversample(requests, args, num_prompts, draw)


DATASETS: dict[str, Callable[[Any, Tokenizer, int, random.Random], list[SampleRequest]]] = {
    "random": random_requests,
    "sharegpt": sharegpt_requests,
    "custom": custom_requests,
    "sonnet": sonnet_requests,
    "hf": hf_requests,
}
