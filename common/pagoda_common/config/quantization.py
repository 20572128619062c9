"""Names of quantizations for ``--quantization``: the checkpoint's method, or a scheme for its floats."""

import re
from dataclasses import dataclass

from pagoda_common.errors import ConfigError

CHECKPOINT_METHODS = {
    "awq": "awq",
    "auto_awq": "awq",
    "awq_marlin": "awq",
    "gptq": "gptq",
    "auto_gptq": "gptq",
    "gptq_marlin": "gptq",
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    "fbgemm_fp8": "fbgemm_fp8",
    "fp8": "fp8",
    "modelopt": "modelopt",
    "gguf": "gguf",
}
"""vLLM's names of checkpoints' methods, to the checkpoints' own names."""
_ALIASES = {"int4": "int4-g128", "int8_per_channel_weight_only": "int8"}
_SCHEME = re.compile(r"int(?P<bits>[48])(?:-g(?P<group_size>32|64|128))?")
SCHEMES = "int8, int8-g32, int8-g64, int8-g128, int4 (int4-g128), int4-g32, int4-g64"
"""Schemes for weights of floats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineQuantization:
    """The scheme to which matrices of floats are quantized while they are read."""

    bits: int
    """4 or 8."""
    group_size: int
    """Inputs that share a scale; 0 is all: one scale for each output."""

    @property
    def name(self) -> str:
        """As it is written."""
        return f"int{self.bits}" + (f"-g{self.group_size}" if self.group_size else "")


def parse_quantization(text: str | None) -> OnlineQuantization | str | None:
    """Parse --quantization: a scheme for floats, the method that a checkpoint must have, or None: as it says.

    Raises:
        ConfigError: neither; the message names all.
    """
    if text is None or text in ("", "auto", "none"):
        return None
    if text in CHECKPOINT_METHODS:
        return CHECKPOINT_METHODS[text]
    match = _SCHEME.fullmatch(_ALIASES.get(text, text))
    if match is None or (match["bits"] == "4" and match["group_size"] is None):
        raise ConfigError(
            f"quantization is {text!r}, must be one of {SCHEMES}, or what the checkpoint is quantized with: "
            f"{', '.join(CHECKPOINT_METHODS)}",
            field="quantization",
        )
    return OnlineQuantization(bits=int(match["bits"]), group_size=int(match["group_size"] or 0))
