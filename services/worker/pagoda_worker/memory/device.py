"""The worker's device: its choice, name, free memory and data types."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from pagoda_common.config.engine_config import ActivationQuantization, AttentionBackend, Device, DType, KVCacheDType
from pagoda_common.errors import ConfigError, ModelLoadError
from pagoda_kernels.attention.quantized_cache import FP8
from pagoda_kernels.external.adapters import ADAPTERS, installed_adapters

SMALL_MODEL_BYTES = 2 * 1024**3
"""Maximum bytes of float32 weights that stay float32 on a CPU if the data type is auto."""

ROUND_OTHERWISE = ("act_and_mul", "paged_attention", "rms_norm", "rope_store")
"""Kernels whose float32 results are as exact as PyTorch's, but not identical."""

MIN_FP8_CAPABILITY = (8, 9)
"""Minimum CUDA compute capability for converting 8-bit floats."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device that was claimed."""

    device: torch.device
    description: str
    """Description, such as "cpu, 2 threads"."""
    total_memory_bytes: int


def claim_device(name: Device, index: int = 0) -> DeviceInfo:
    """The device to run on; auto uses an accelerator if there is one.

    Args:
        index: of the accelerator; wraps around if there are fewer.

    Raises:
        ConfigError: cuda is requested, and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device is 'cuda', but torch finds no CUDA device", field="device")
    if name == "cpu" or not has_cuda:
        return DeviceInfo(torch.device("cpu"), f"cpu, {len(os.sched_getaffinity(0))} cores", _total_memory_bytes())
    device = torch.device("cuda", index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    return DeviceInfo(device, f"cuda, {properties.name}", properties.total_memory)


def choose_dtype(asked: DType, stored: str | None, *, device: torch.device, num_parameters: int) -> torch.dtype:
    """The data type of weights and KV cache.

    auto takes the checkpoint's, with one exception: on a CPU a small model runs in float32. There 16-bit rounding would
    make a token depend on the rest of the batch (sums are split differently for other batch sizes), and many CPUs have
    no fast 16-bit arithmetic.

    Raises:
        ModelLoadError: the checkpoint's data type cannot be used for computation.
    """
    if asked != "auto":
        return DTYPES[asked]
    if stored is None:
        return torch.float32
    if stored not in DTYPES:
        raise ModelLoadError(f"the checkpoint's dtype is {stored!r}; choose one with --dtype: {', '.join(DTYPES)}")
    if device.type == "cpu" and num_parameters * 4 <= SMALL_MODEL_BYTES:
        return torch.float32
    return DTYPES[stored]


def quantizes_inputs(asked: ActivationQuantization, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether layers with quantized weights also quantize their inputs to 8 bits.

    Only in bfloat16, which itself has 8 significant bits: float16 and float32 are more exact than such inputs. Only on
    a CPU: the GPU's kernel multiplies floats.
    """
    return asked == "auto" and dtype == torch.bfloat16 and device.type == "cpu"


def cache_dtype(asked: KVCacheDType, dtype: torch.dtype) -> torch.dtype:
    """The data type of the KV cache; auto takes that of the weights."""
    return {"auto": dtype, "int8": torch.int8, "fp8": FP8}[asked]


def check_cache_dtype(asked: KVCacheDType, device: torch.device) -> None:
    """Check that this device has kernels for such a cache.

    Raises:
        ConfigError: it does not; the message names the supported types.
    """
    if asked != "fp8":
        return
    if device.type != "cuda":
        raise ConfigError("kv_cache_dtype is 'fp8', must be auto or int8 on a CPU", field="kv_cache_dtype")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_FP8_CAPABILITY:
        mine, needed = (".".join(map(str, pair)) for pair in (capability, MIN_FP8_CAPABILITY))
        raise ConfigError(
            f"kv_cache_dtype is 'fp8', must be auto or int8 on a device of compute capability {mine}, below {needed}",
            field="kv_cache_dtype",
        )


def check_attention_backend(asked: AttentionBackend, device: torch.device) -> None:
    """Check that this device has these attention kernels, with the installed packages.

    Raises:
        ConfigError: it does not; the message names the available ones.
    """
    if asked == "auto":
        return
    if device.type != "cuda":
        raise ConfigError(f"attention_backend is {asked!r}, must be auto on a CPU", field="attention_backend")
    installed = [adapter.name for adapter in installed_adapters()]
    if asked != "triton" and asked not in installed:
        adapter, choices = ADAPTERS[asked], ", ".join(("auto", "triton", *installed))
        raise ConfigError(
            f"attention_backend is {asked!r}, must be one of {choices}: no package {adapter.distribution} is installed",
            field="attention_backend",
        )


def reference_kernels(asked: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
    """The kernels to replace by plain PyTorch, for --reference-kernels `asked`; none keeps every kernel.

    On a CPU in float32 a model uses PyTorch's operations by default. float32 is chosen to compare with transformers,
    whose own rounding moves log probabilities by up to 5e-4; only the same operations stay within 1e-4.
    """
    if not asked:
        return ROUND_OTHERWISE if dtype == torch.float32 and device.type == "cpu" else ()
    return tuple(name for name in asked if name != "none")


def available_memory_bytes() -> int:
    """Bytes of host memory that this process can still allocate, within the limit of its control group if any."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"))
    available = int(match[1]) * 1024 if match else _total_memory_bytes() // 2
    for limit_path, used_path in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, used = _read(limit_path).strip(), _read(used_path).strip()
        if limit.isdigit() and used.isdigit():
            available = min(available, max(int(limit) - int(used), 0))
    return available


def free_memory_bytes(device: torch.device) -> int:
    """Free bytes of a device, after this process has returned unused memory."""
    if device.type == "cpu":
        return available_memory_bytes()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def _total_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""
