"""Options of recurrent layers, and how ranks share their parameters. Numbers and names; no tensors."""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from pagoda_common.errors import ConfigError, ModelLoadError

Mixer: TypeAlias = Literal["attention", "recurrent", "both", "linear", "none"]
"""Mixer of a layer before its feed-forward; both: in parallel, over the same input; linear: one matrix, which mixes no
tokens."""
GatedNorm: TypeAlias = Literal["gate_first", "norm_first", "none"]
MambaNorm: TypeAlias = Literal["none", "plain", "weights"]
"""Norms on steps, B and C: none, without a weight, or with one each."""
Part: TypeAlias = tuple[int, bool]
"""Number of rows of a part of a parameter, and whether ranks divide them; else each rank has all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaNetSpec:
    """A gated delta net."""

    num_key_heads: int
    """Heads of queries and of keys."""
    num_value_heads: int
    key_dim: int
    """Size of a head of queries and keys."""
    value_dim: int
    conv_width: int
    """Number of tokens that the short convolution sees."""

    def __post_init__(self) -> None:
        if min(self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim) < 1 or self.conv_width < 2:
            raise ModelLoadError(f"sizes of the gated delta net must be at least 1, and its convolution's 2: {self}")
        if self.num_value_heads % self.num_key_heads:
            raise ModelLoadError(
                f"{self.num_value_heads} value heads cannot share {self.num_key_heads} key heads evenly"
            )

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def of_rank(self, world_size: int) -> "DeltaNetSpec":
        """One rank's part.

        Raises:
            ConfigError: the ranks cannot share the layer.
        """
        _check_divides(world_size, "linear_num_key_heads", self.num_key_heads)
        return replace(
            self,
            num_key_heads=self.num_key_heads // world_size,
            num_value_heads=self.num_value_heads // world_size,
        )

    def parts(self, parameter: str, world_size: int) -> tuple[Part, ...]:
        """Parts of the rows of a whole parameter; no parts: every rank has all of it."""
        keys, values = (self.num_key_heads * self.key_dim, True), (self.num_value_heads * self.value_dim, True)
        heads = (self.num_value_heads, True)
        return {
            "in_proj": (keys, keys, values, values),
            "conv_weight": (keys, keys, values),
            "ba_proj": (heads, heads),
            "decay_log": (heads,),
            "step_bias": (heads,),
        }.get(parameter, ())


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaSpec:
    """A Mamba layer (version 1)."""

    num_channels: int
    state_size: int
    """State size per channel."""
    conv_width: int
    """Number of tokens that the short convolution sees."""
    step_rank: int
    """Rank of the projection for steps."""
    conv_bias: bool = True
    bias: bool = False
    """Whether the first and the last projection have biases."""
    norm: MambaNorm = "none"
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if min(self.num_channels, self.state_size, self.step_rank) < 1 or self.conv_width < 2:
            raise ModelLoadError(f"sizes of a Mamba layer must be at least 1, and its convolution's 2: {self}")

    def of_rank(self, world_size: int) -> "MambaSpec":
        """One rank's part.

        Raises:
            ConfigError: the ranks cannot share the layer.
        """
        _check_divides(world_size, "the number of Mamba channels", self.num_channels)
        return replace(self, num_channels=self.num_channels // world_size)

    def parts(self, parameter: str, world_size: int) -> tuple[Part, ...]:
        """Of the rows of a whole parameter; none: every rank has all of it."""
        channels = (self.num_channels, True)
        if parameter == "in_proj":
            return channels, channels
        shared = ("conv_weight", "conv_bias", "step_proj", "step_bias", "decay_log", "skip")
        return (channels,) if parameter in shared else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Spec:
    """A Mamba-2 layer."""

    num_heads: int
    head_dim: int
    num_groups: int
    """Number of groups: consecutive heads share B and C."""
    state_size: int
    conv_width: int
    """Number of tokens that the short convolution sees."""
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    norm: GatedNorm = "gate_first"
    """Norm of the output: after the gate, before it, or none."""
    norm_eps: float | None = None
    """Epsilon of that norm; None: the model's."""
    norm_groups: int = 1
    """Number of groups of columns, each with its own mean square."""
    shares_norm: bool = False
    """Whether the norm's only group spans the values of all ranks."""
    steps: tuple[float, float] = (0.0, float("inf"))
    """Minimum and maximum of a step of the state."""
    in_multiplier: float = 1.0
    """Multiplier on the input (Falcon-H1)."""
    part_multipliers: tuple[float, ...] = ()
    """Multipliers on the projected gate, x, B, C and step (Falcon-H1); empty: none."""

    def __post_init__(self) -> None:
        if min(self.num_heads, self.head_dim, self.num_groups, self.state_size) < 1 or self.conv_width < 2:
            raise ModelLoadError(f"sizes of a Mamba-2 layer must be at least 1, and its convolution's 2: {self}")
        if self.num_heads % self.num_groups:
            raise ModelLoadError(f"{self.num_heads} Mamba heads cannot share {self.num_groups} groups evenly")
        if self.num_values % self.norm_groups:
            raise ModelLoadError(f"{self.num_values} values cannot be normalised in {self.norm_groups} groups")
        if self.part_multipliers and len(self.part_multipliers) != 5:
            raise ModelLoadError(f"ssm_multipliers are {len(self.part_multipliers)}, must be 5")

    @property
    def num_values(self) -> int:
        """Number of values of a token, over all heads."""
        return self.num_heads * self.head_dim

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Rows of the parts of the first projection: gate, x, B, C and step."""
        shared = self.num_groups * self.state_size
        return self.num_values, self.num_values, shared, shared, self.num_heads

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return sum(self.sizes[1:4])

    def of_rank(self, world_size: int) -> "Mamba2Spec":
        """One rank's part. A single group is on every rank, and its norm spans the values of all ranks.

        Raises:
            ConfigError: the ranks cannot share the layer.
        """
        _check_divides(world_size, "the number of Mamba heads", self.num_heads)
        for name, count in (("the number of Mamba groups", self.num_groups), ("its norm's groups", self.norm_groups)):
            if count > 1:
                _check_divides(world_size, name, count)
        return replace(
            self,
            num_heads=self.num_heads // world_size,
            num_groups=max(1, self.num_groups // world_size),
            norm_groups=max(1, self.norm_groups // world_size),
            shares_norm=world_size > 1 and self.norm_groups == 1,
        )

    def parts(self, parameter: str, world_size: int) -> tuple[Part, ...]:
        """Parts of the rows of a whole parameter; no parts: every rank has all of it."""
        gate, x, b, c, step = self.sizes
        is_split = self.num_groups % world_size == 0
        channels = ((x, True), (b, is_split), (c, is_split))
        heads = (self.num_heads, True)
        return {
            "in_proj": ((gate, True), *channels, (step, True)),
            "conv_weight": channels,
            "conv_bias": channels,
            "norm_weight": ((self.num_values, True),),
            "decay_log": (heads,),
            "step_bias": (heads,),
            "skip": (heads,),
        }.get(parameter, ())


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvSpec:
    """A short convolution between two gates."""

    num_channels: int
    conv_width: int
    """Tokens that it sees."""
    bias: bool = False
    """Whether the convolution and both projections have biases."""

    def __post_init__(self) -> None:
        if self.num_channels < 1 or self.conv_width < 2:
            raise ModelLoadError(f"a short convolution must have channels and see 2 tokens: {self}")

    def of_rank(self, world_size: int) -> "ShortConvSpec":
        """One rank's part.

        Raises:
            ConfigError: the ranks cannot share the layer.
        """
        _check_divides(world_size, "the channels of the short convolution", self.num_channels)
        return replace(self, num_channels=self.num_channels // world_size)

    def parts(self, parameter: str, world_size: int) -> tuple[Part, ...]:
        """Parts of the rows of a whole parameter; no parts: every rank has all of it."""
        channels = (self.num_channels, True)
        if parameter == "in_proj":
            return channels, channels, channels
        return (channels,) if parameter in ("conv_weight", "conv_bias") else ()


RecurrentSpec: TypeAlias = DeltaNetSpec | MambaSpec | Mamba2Spec | ShortConvSpec


def _check_divides(world_size: int, name: str, count: int) -> None:
    if count % world_size:
        raise ConfigError(f"world_size is {world_size}, must divide {name}, {count}", field="world_size")
