"""EXAONE 4: norms behind attention and feed-forward and on heads; layers without a window have no positions."""

from pagoda_worker.models.hf_config import LOCAL, HfConfig, get, layer_kinds, windows
from pagoda_worker.models.llama import common
from pagoda_worker.models.spec import DecoderSpec


def exaone4_spec(config: HfConfig) -> DecoderSpec:
    """Exaone4ForCausalLM. Without any window, every layer has positions."""
    options = common(config, num_kv_heads=32, default_eps=1e-5)
    window = config.get("sliding_window", 4096)
    pattern = int(get(config, "sliding_window_pattern", 4)) if window is not None else 1
    kinds = layer_kinds(config, options["num_layers"], lambda layer: (layer + 1) % pattern != 0)
    return DecoderSpec(
        architecture="Exaone4ForCausalLM",
        norms="output",
        qk_norm="head",
        layer_ropes=tuple(options["rope"] if window is None or kind == LOCAL else None for kind in kinds),
        windows=windows(kinds, window),
        **options,
    )
