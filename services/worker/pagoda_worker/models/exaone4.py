"""EXAONE 4: norms after attention and feed-forward and on heads; layers without a window have no positions."""

from collections.abc import Callable

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.config_keys import unused
from pagoda_worker.models.hf_config import LOCAL, HfConfig, get, layer_kinds, windows
from pagoda_worker.models.llama import common
from pagoda_worker.models.spec import DecoderSpec


def exaone4_spec(config: HfConfig) -> DecoderSpec:
    """Exaone4ForCausalLM. Without any window, every layer has positions."""
    options = common(config, num_kv_heads=32, default_eps=1e-5)
    unused(config, "sliding_window_pattern")  # without a window
    window = config.get("sliding_window", 4096)
    kinds = layer_kinds(config, options["num_layers"], _pattern(config) if window is not None else lambda layer: False)
    return DecoderSpec(
        architecture="Exaone4ForCausalLM",
        norms="output",
        qk_norm="head",
        layer_ropes=tuple(options["rope"] if window is None or kind == LOCAL else None for kind in kinds),
        windows=windows(kinds, window),
        **options,
    )


def _pattern(config: HfConfig) -> Callable[[int], bool]:
    """Which layers have a window: all except every nth, or by repeated letters, L for a window. With letters, the last
    layer never has one (the authors' rule)."""
    pattern = get(config, "sliding_window_pattern", 4)
    if not isinstance(pattern, str):
        period = int(pattern)
        return lambda layer: (layer + 1) % period != 0
    if not pattern or set(pattern) - {"L", "G"}:
        raise ModelLoadError(f"sliding_window_pattern is {pattern!r}, must be a number or made of the letters L and G")
    last = int(config["num_hidden_layers"]) - 1
    return lambda layer: layer != last and pattern[layer % len(pattern)] == "L"
