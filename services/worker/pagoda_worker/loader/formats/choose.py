"""Chooses the format of a checkpoint's quantized matrices, by config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from pagoda_common.errors import ModelLoadError
from pagoda_worker.loader.formats.bitsandbytes import bitsandbytes_format
from pagoda_worker.loader.formats.compressed_tensors import CompressedTensors
from pagoda_worker.loader.formats.gptq_awq import Awq, Gptq
from pagoda_worker.loader.formats.scaled import Float8, modelopt_format
from pagoda_worker.loader.formats.stored_format import StoredFormat
from pagoda_worker.models.hf_config import HfConfig

METHODS: Mapping[str, Callable[[Mapping[str, Any]], StoredFormat]] = {
    "awq": Awq,
    "gptq": Gptq,
    "bitsandbytes": bitsandbytes_format,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Float8,
    "fp8": Float8,
    "modelopt": modelopt_format,
}
"""By quantization_config.quant_method."""


def stored_format(config: HfConfig) -> tuple[str, StoredFormat | None] | None:
    """The method that config.json names and its format (None if the files define it); None: weights are floats.

    Raises:
        ModelLoadError: a method, or one of its options, is not supported.
    """
    options = config.get("quantization_config") or config.get("compression_config")
    if not options:
        return None
    if not isinstance(options, dict):
        raise ModelLoadError(f"quantization_config is {options!r}, must be an object", field="quantization_config")
    method = str(options.get("quant_method", "unknown"))
    if method == "mxfp4":  # experts alone, which their family makes floats of
        return None
    if method == "gguf":
        return method, None
    if method not in METHODS:
        raise ModelLoadError(
            f"the checkpoint is quantized with {method!r}, must be one of {', '.join(METHODS)}",
            field="quantization_config",
        )
    return method, METHODS[method](options)
