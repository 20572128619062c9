"""The device, its data types and its memory, with a made-up machine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagoda_common.errors import ConfigError, ModelLoadError
from pagoda_kernels.attention.quantized_cache import FP8
from pagoda_worker.memory import device as module
from pagoda_worker.memory.device import (
    SMALL_MODEL_BYTES,
    available_memory_bytes,
    cache_dtype,
    check_attention_backend,
    check_cache_dtype,
    choose_dtype,
    claim_device,
    free_memory_bytes,
    quantizes_inputs,
    reference_kernels,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SMALL = SMALL_MODEL_BYTES // 4


@pytest.mark.parametrize(
    ("asked", "stored", "device", "num_parameters", "expected"),
    [
        ("float16", "bfloat16", CPU, 1, torch.float16),
        ("bfloat16", None, CUDA, 1, torch.bfloat16),
        ("float32", "unknown", CUDA, 1, torch.float32),
        ("auto", None, CUDA, SMALL + 1, torch.float32),
        ("auto", "bfloat16", CPU, SMALL, torch.float32),
        ("auto", "bfloat16", CPU, SMALL + 1, torch.bfloat16),
        ("auto", "float16", CPU, SMALL + 1, torch.float16),
        ("auto", "float16", CUDA, 1, torch.float16),
        ("auto", "float32", CUDA, 1, torch.float32),
    ],
)
def test_the_data_type_is_the_checkpoint_s_but_for_small_models_on_a_cpu(
    asked: Any, stored: str | None, device: torch.device, num_parameters: int, expected: torch.dtype
) -> None:
    assert SMALL_MODEL_BYTES == 2 << 30
    assert choose_dtype(asked, stored, device=device, num_parameters=num_parameters) is expected


def test_a_data_type_that_no_one_computes_with_is_refused() -> None:
    message = "the checkpoint's dtype is 'float8_e4m3fn'; choose one with --dtype: float32, bfloat16, float16"
    with pytest.raises(ModelLoadError, match=message):
        choose_dtype("auto", "float8_e4m3fn", device=CPU, num_parameters=1)


@pytest.mark.parametrize(
    ("asked", "dtype", "device", "expected"),
    [
        ("auto", torch.bfloat16, CPU, True),
        ("none", torch.bfloat16, CPU, False),
        ("auto", torch.float16, CPU, False),
        ("auto", torch.float32, CPU, False),
        ("auto", torch.bfloat16, CUDA, False),
    ],
)
def test_inputs_are_quantized_in_bfloat16_on_a_cpu(
    asked: Any, dtype: torch.dtype, device: torch.device, expected: bool
) -> None:
    assert quantizes_inputs(asked, dtype, device) is expected


def test_the_cache_has_the_data_type_that_is_asked_for() -> None:
    found = [cache_dtype(asked, torch.float16) for asked in ("auto", "int8", "fp8")]  # type: ignore[arg-type]  # literals
    assert found == [torch.float16, torch.int8, FP8]


@pytest.mark.parametrize(
    ("capability", "is_refused"), [((8, 0), True), ((8, 8), True), ((8, 9), False), ((9, 0), False)]
)
def test_an_fp8_cache_needs_a_device_that_converts_it(
    capability: tuple[int, int], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for asked in ("auto", "int8"):
        for device in (CPU, CUDA):
            check_cache_dtype(asked, device)  # type: ignore[arg-type]  # literals
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp8', must be auto or int8 on a CPU") as caught:
        check_cache_dtype("fp8", CPU)
    assert caught.value.field == "kv_cache_dtype"
    if is_refused:
        major, minor = capability
        with pytest.raises(ConfigError, match=f"compute capability {major}.{minor}, below 8.9") as caught:
            check_cache_dtype("fp8", CUDA)
        assert caught.value.field == "kv_cache_dtype"
    else:
        check_cache_dtype("fp8", CUDA)


def test_attention_of_a_package_needs_it_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "installed_adapters", lambda: [SimpleNamespace(name="flash_attn")])
    for asked in ("auto", "triton", "flash_attn"):
        check_attention_backend(asked, CUDA)  # type: ignore[arg-type]  # literals
    check_attention_backend("auto", CPU)
    for name in ("triton", "flash_attn"):
        with pytest.raises(ConfigError, match=f"attention_backend is '{name}', must be auto on a CPU") as caught:
            check_attention_backend(name, CPU)  # type: ignore[arg-type]  # literals
        assert caught.value.field == "attention_backend"
    with pytest.raises(ConfigError, match="must be one of auto, triton, flash_attn: no package flashinfer-python"):
        check_attention_backend("flashinfer", CUDA)


@pytest.mark.parametrize(
    ("asked", "dtype", "device", "expected"),
    [
        ((), torch.float32, CPU, ("act_and_mul", "paged_attention", "rms_norm", "rope_store")),
        ((), torch.bfloat16, CPU, ()),
        ((), torch.float32, CUDA, ()),
        (("none",), torch.float32, CPU, ()),
        (("rms_norm", "none", "argmax"), torch.bfloat16, CUDA, ("rms_norm", "argmax")),
    ],
)
def test_in_float32_on_a_cpu_some_kernels_are_pytorch_s(
    asked: tuple[str, ...], dtype: torch.dtype, device: torch.device, expected: tuple[str, ...]
) -> None:
    assert reference_kernels(asked, dtype, device) == expected


MEMORY = {
    "/proc/meminfo": "MemTotal:  100 kB\nMemAvailable:     40 kB\n",
    "/sys/fs/cgroup/memory.max": "",
    "/sys/fs/cgroup/memory.current": "",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 40 * 1024),
        ({"/sys/fs/cgroup/memory.max": "max\n", "/sys/fs/cgroup/memory.current": "5\n"}, 40 * 1024),
        ({"/sys/fs/cgroup/memory.max": "30000\n", "/sys/fs/cgroup/memory.current": "10000\n"}, 20_000),
        ({"/sys/fs/cgroup/memory.max": "90000\n", "/sys/fs/cgroup/memory.current": "10000\n"}, 40 * 1024),
        ({"/sys/fs/cgroup/memory.max": "100\n", "/sys/fs/cgroup/memory.current": "200\n"}, 0),
        ({"/sys/fs/cgroup/memory.max": "100\n"}, 40 * 1024),
        (
            {
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "700",
                "/sys/fs/cgroup/memory/memory.usage_in_bytes": "300",
            },
            400,
        ),
        ({"/proc/meminfo": ""}, 500),
    ],
)
def test_available_memory_is_the_machine_s_within_the_control_group_s(
    files: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_read", lambda path: {**MEMORY, **files}.get(path, ""))
    monkeypatch.setattr(module, "_total_memory_bytes", lambda: 1000)
    assert available_memory_bytes() == expected
    assert free_memory_bytes(CPU) == expected


def test_a_file_that_is_not_there_is_empty(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("text")
    assert (module._read(str(tmp_path / "there")), module._read(str(tmp_path / "none"))) == ("text", "")


def test_a_cpu_is_described_by_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: {1, 5, 6})
    monkeypatch.setattr(module, "_total_memory_bytes", lambda: 1000)
    for name in ("auto", "cpu"):
        found = claim_device(name)  # type: ignore[arg-type]  # literals
        assert (found.device, found.description, found.total_memory_bytes) == (CPU, "cpu, 3 cores", 1000)
    with pytest.raises(ConfigError, match="device is 'cuda', but torch finds no CUDA device") as caught:
        claim_device("cuda")
    assert caught.value.field == "device"


def test_an_accelerator_is_taken_by_its_index_counted_round(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    properties = SimpleNamespace(name="Device 9", total_memory=77)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for index, place in ((0, 0), (1, 1), (2, 0), (5, 1)):
        found = claim_device("auto", index)
        assert found.device == torch.device("cuda", place) == taken[-1]
        assert (found.description, found.total_memory_bytes) == ("cuda, Device 9", 77)
    assert claim_device("cuda").device == torch.device("cuda", 0)
    assert claim_device("cpu").device == CPU


def test_unused_memory_of_an_accelerator_is_returned_before_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(("wait", device)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("return"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: calls.append(("count", device)) or (70, 80))
    assert free_memory_bytes(CUDA) == 70
    assert calls == [("wait", CUDA), "return", ("count", CUDA)]
