"""DecoderSpec: the options of the decoder core. Built from a checkpoint's config.json by each family."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pagoda_common.errors import ModelLoadError

HfConfig: TypeAlias = dict[str, Any]
"""A parsed config.json."""
NormKind: TypeAlias = Literal["rms_norm", "layer_norm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary position embedding."""

    theta: float = 10000.0
    """Base wavelength."""
    rope_type: str = "default"
    """default, linear, dynamic, llama3 or yarn."""
    parameters: tuple[tuple[str, Any], ...] = ()
    """What the type needs, as in the checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSpec:
    """One decoder-only model."""

    architecture: str
    vocab_size: int
    """Rows of the embedding and columns of the logits."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    """Longest sequence the checkpoint was made for, tokens."""
    activation: str
    """Name as in config.json: silu, gelu_new, relu, …"""
    norm: NormKind = "rms_norm"
    norm_eps: float = 1e-6
    norm_has_weights: bool = True
    """False: a layer norm without weight and bias."""
    is_gated: bool = True
    """down(act(gate(x)) * up(x)); else fc2(act(fc1(x)))."""
    is_post_norm: bool = False
    """Norms stand behind the residual sums (OPT-350m), not before attention and feed-forward."""
    has_final_norm: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    has_qk_norm: bool = False
    """Each head's query and key pass a norm before the rotation (Qwen3)."""
    rope: RopeSpec | None = None
    """None: learned positions."""
    position_offset: int = 0
    """Rows of the position table before position 0 (OPT has 2)."""
    embedding_dim: int | None = None
    """Width of the token embedding where it is not hidden_size; projected in and out (OPT-350m)."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer; None sees all. Empty: none has a window."""
    scales: tuple[float, ...] = ()
    """Softmax scale of each layer; empty is head_dim ** -0.5."""
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type is int and field.name != "position_offset" and getattr(self, field.name) < 1:
                raise ModelLoadError(f"{field.name} is {getattr(self, field.name)}, must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.rope is not None and self.head_dim % 2:
            raise ModelLoadError(f"head_dim is {self.head_dim}, must be even to rotate")

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer, tokens."""
        return self.windows[layer] if self.windows else None

    def scale(self, layer: int) -> float:
        """Softmax scale of a layer."""
        return self.scales[layer] if self.scales else self.head_dim**-0.5


def required(config: HfConfig, name: str) -> Any:
    """A value of config.json.

    Raises:
        ModelLoadError: it is missing.
    """
    value = config.get(name)
    if value is None:
        raise ModelLoadError(f"config.json has no {name}")
    return value


def get(config: HfConfig, name: str, default: Any) -> Any:
    """A value of config.json, or the default where it is missing or null."""
    value = config.get(name)
    return default if value is None else value
