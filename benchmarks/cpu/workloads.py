"""The five workloads: which prompts, how many outputs, how many at a time. Knows no engine; standard library only."""

import random
from dataclasses import dataclass

MAX_MODEL_LEN = 2304
"""Longest sequence that every engine must take; the longest workload needs 2,049."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Prompts of random token ids, all given at once, greedy, each with exactly `num_outputs` outputs."""

    name: str
    title: str
    prompt_lens: tuple[int, ...]
    """Tokens of each prompt, the shared prefix included."""
    num_outputs: int
    """Tokens generated for each prompt; the end-of-sequence token is ignored."""
    prefix_len: int = 0
    """Tokens that all prompts begin with."""
    concurrency: int = 0
    """Requests open at a time; 0 is all of them."""
    is_served: bool = False
    """Sent to an OpenAI server over HTTP, each answer a stream; else given to the engine's library."""

    def prompts(self, *, vocab_size: int, seed: str) -> list[list[int]]:
        """Token ids of every prompt; the same ones for the same seed. The first 300 and last 8 ids are left out."""
        draw = random.Random(f"{self.name} {seed}")
        prefix = draw_ids(draw, self.prefix_len, vocab_size)
        return [prefix + draw_ids(draw, length - self.prefix_len, vocab_size) for length in self.prompt_lens]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(self.prompt_lens)

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence at its end."""
        return max(self.prompt_lens) + self.num_outputs

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated for all prompts together."""
        return len(self.prompt_lens) * self.num_outputs


def draw_ids(draw: random.Random, length: int, vocab_size: int) -> list[int]:
    """Ids of ordinary tokens: no bytes, no special ones."""
    return [draw.randrange(min(300, vocab_size // 2), vocab_size - 8) for _ in range(length)]


def spread(low: int, high: int, count: int) -> tuple[int, ...]:
    """`count` lengths spaced evenly from `low` to `high`, in a mixed order that is always the same."""
    lengths = [low + round(place * (high - low) / (count - 1)) for place in range(count)]
    random.Random(0).shuffle(lengths)
    return tuple(lengths)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="W1", title="one stream, 128 tokens in, 128 out", prompt_lens=(128,), num_outputs=128),
        Workload(
            name="W2",
            title="32 requests offline, 32 to 256 tokens in, 64 out",
            prompt_lens=spread(32, 256, 32),
            num_outputs=64,
        ),
        Workload(
            name="W3",
            title="OpenAI server, 16 streams at a time, 64 requests, 128 tokens in, 64 out",
            prompt_lens=(128,) * 64,
            num_outputs=64,
            concurrency=16,
            is_served=True,
        ),
        Workload(
            name="W4",
            title="32 requests offline with one prefix of 1,024 tokens and 32 of their own, 16 out, cache cold",
            prompt_lens=(1024 + 32,) * 32,
            num_outputs=16,
            prefix_len=1024,
        ),
        Workload(name="W5", title="one prompt of 2,048 tokens, 1 out", prompt_lens=(2048,), num_outputs=1),
    )
}

SMOKE = {
    workload.name: workload
    for workload in (
        Workload(name="W1", title="one stream, 16 in, 8 out", prompt_lens=(16,), num_outputs=8),
        Workload(name="W2", title="4 requests, 8 to 32 in, 8 out", prompt_lens=spread(8, 32, 4), num_outputs=8),
        Workload(
            name="W3",
            title="server, 2 streams at a time, 6 requests, 16 in, 8 out",
            prompt_lens=(16,) * 6,
            num_outputs=8,
            concurrency=2,
            is_served=True,
        ),
        Workload(
            name="W4", title="4 requests, 64 shared, 8 own, 4 out", prompt_lens=(72,) * 4, num_outputs=4, prefix_len=64
        ),
        Workload(name="W5", title="one prompt of 128, 1 out", prompt_lens=(128,), num_outputs=1),
    )
}
"""The same in small, to see that everything runs (`--smoke`)."""


def warm_up(workload: Workload) -> Workload:
    """What runs untimed before `workload`: the same batch without its shared prefix, at most four outputs each.

    Kernels are then compiled and memory is there. Give it another seed, so that no prefix of the real one is cached.
    """
    return Workload(
        name=workload.name,
        title=workload.title,
        prompt_lens=tuple(
            length - workload.prefix_len for length in workload.prompt_lens[: workload.concurrency or None]
        ),
        num_outputs=min(workload.num_outputs, 4),
        concurrency=workload.concurrency,
        is_served=workload.is_served,
    )
