"""The shapes of the models that are measured, and what a pass through them reads and computes. Numbers only."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cpu.workloads import Workload

KV_BYTES = 2
"""Bytes of one number in the KV cache (bf16)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBytes:
    """Bytes of one weight, scales included."""

    linear: float = 2.0
    head: float = 2.0
    """Of the output layer, which keeps 8 bits where the others have 4."""


BF16 = WeightBytes()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShape:
    """The mixture of experts of every layer."""

    num_experts: int
    num_chosen: int
    """Experts of a token."""
    intermediate_size: int
    """Of one expert."""

    def num_read(self, num_tokens: int) -> float:
        """Experts that so many tokens choose on average, if all are as likely."""
        return self.num_experts * (1 - (1 - self.num_chosen / self.num_experts) ** num_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A decoder."""

    name: str
    architecture: str
    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    is_tied: bool
    """The output layer is the embedding."""
    experts: ExpertShape | None = None
    """In place of the feed-forward."""

    @property
    def linear_params(self) -> int:
        """Weights of every layer's matrices that each token is multiplied with."""
        return self._layer_params(1.0 if self.experts is None else self.experts.num_chosen)

    def _layer_params(self, num_experts: float) -> int:
        """With so many experts, or feed-forward parts."""
        attention = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads) * self.hidden_size
        size, router = self.intermediate_size, 0
        if self.experts is not None:
            size, router = self.experts.intermediate_size, self.experts.num_experts * self.hidden_size
        return self.num_layers * (attention + router + int(3 * self.hidden_size * size * num_experts))

    @property
    def head_params(self) -> int:
        """Weights of the output layer."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """All weights, norms aside."""
        layers = self._layer_params(1.0 if self.experts is None else self.experts.num_experts)
        return layers + self.head_params * (1 if self.is_tied else 2)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that a token has in the KV cache."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * KV_BYTES

    def step_bytes(self, *, num_cached: int, num_tokens: int = 1, weight_bytes: WeightBytes = BF16) -> float:
        """Bytes that a decode step of `num_tokens` reads at least: every weight once, of experts those that are chosen,
        and `num_cached` tokens of KV cache."""
        layers = self._layer_params(1.0 if self.experts is None else self.experts.num_read(num_tokens))
        weights = layers * weight_bytes.linear + self.head_params * weight_bytes.head
        return weights + num_cached * self.kv_bytes_per_token

    def flop(self, *, num_tokens: int, num_pairs: int, num_sampled: int) -> float:
        """Floating-point operations for `num_tokens`, `num_pairs` of query and key, `num_sampled` rows of logits."""
        attention = 4 * self.num_layers * self.num_heads * self.head_dim * num_pairs
        return 2 * self.linear_params * num_tokens + attention + 2 * self.head_params * num_sampled


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="125m",
            architecture="LlamaForCausalLM",
            model_type="llama",
            hidden_size=768,
            num_layers=12,
            num_heads=12,
            num_kv_heads=12,
            head_dim=64,
            intermediate_size=2048,
            vocab_size=32000,
            is_tied=False,
        ),
        Shape(
            name="0.6b",
            architecture="Qwen3ForCausalLM",
            model_type="qwen3",
            hidden_size=1024,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=3072,
            vocab_size=151936,
            is_tied=True,
        ),
        Shape(
            name="moe",
            architecture="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            hidden_size=1024,
            num_layers=16,
            num_heads=16,
            num_kv_heads=4,
            head_dim=64,
            intermediate_size=512,
            vocab_size=32000,
            is_tied=False,
            experts=ExpertShape(num_experts=64, num_chosen=8, intermediate_size=512),
        ),
        Shape(
            name="smoke",
            architecture="LlamaForCausalLM",
            model_type="llama",
            hidden_size=128,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=64,
            intermediate_size=256,
            vocab_size=1024,
            is_tied=False,
        ),
    )
}
"""125m, 0.6b (Llama's 125M shape and Qwen3-0.6B's) and moe are measured; smoke shows that everything runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """What this machine does at best."""

    read_bytes_per_s: float
    flop_per_s: float

    def step_s(self, shape: Shape, *, cached_lens: Sequence[int], weight_bytes: WeightBytes = BF16) -> float:
        """Least seconds of a decode step of sequences with these many cached tokens."""
        num_cached = sum(cached_lens)
        flop = shape.flop(num_tokens=len(cached_lens), num_pairs=num_cached, num_sampled=len(cached_lens))
        read = shape.step_bytes(num_cached=num_cached, num_tokens=len(cached_lens), weight_bytes=weight_bytes)
        return max(read / self.read_bytes_per_s, flop / self.flop_per_s)

    def workload_s(self, shape: Shape, workload: Workload, *, weight_bytes: WeightBytes = BF16) -> float:
        """Least seconds of a workload: every prompt computed once (a shared prefix once in all), then full steps."""
        lens, prefix = workload.prompt_lens, workload.prefix_len
        num_tokens = prefix + sum(length - prefix for length in lens)
        num_pairs = prefix * prefix // 2 + sum((length**2 - prefix**2) // 2 for length in lens)
        prefill = shape.flop(num_tokens=num_tokens, num_pairs=num_pairs, num_sampled=len(lens)) / self.flop_per_s
        width = workload.concurrency or len(lens)
        decode = 0.0
        for first in range(0, len(lens), width):
            batch = lens[first : first + width]
            for step in range(1, workload.num_outputs):
                cached = [length + step for length in batch]
                decode += self.step_s(shape, cached_lens=cached, weight_bytes=weight_bytes)
        return prefill + decode
