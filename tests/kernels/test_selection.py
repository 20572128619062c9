"""Which implementation runs: names that are set aside, devices, and levels of a made-up CPU."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pagoda_kernels import selection
from pagoda_kernels.attention.tables import make_tables
from pagoda_kernels.native import build, library
from pagoda_kernels.sampling.philox import philox4x32, philox_keys
from pagoda_kernels.selection import is_set_aside, triton_kernel, triton_on_cpu, use_references

CUDA = cast("Any", SimpleNamespace(is_cuda=True, is_cpu=False, device=torch.device("cuda", 0)))
CPU_TENSOR = torch.zeros(1)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> object:
    """A Triton kernel of a made-up operation, on devices that are good enough."""
    module, found = ModuleType("pagoda_kernels.triton.made_up"), object()
    module.made_up = found  # type: ignore[attr-defined]  # it is made up
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(selection, "_can_run", lambda device: True)
    selection._load.cache_clear()
    return found


def test_a_kernel_is_for_tensors_of_a_device_unless_it_is_set_aside(kernel: object) -> None:
    assert triton_kernel("made_up", CUDA) is kernel
    assert triton_kernel("made_up", CPU_TENSOR) is None
    for names, is_there in ((["other"], True), (["made_up"], False), (["all"], False), ((), True)):
        use_references(names)
        assert (triton_kernel("made_up", CUDA) is kernel) is is_there
        assert is_set_aside("made_up") is not is_there


def test_on_a_cpu_kernels_run_in_the_interpreter_alone(kernel: object) -> None:
    meta = torch.zeros(1, device="meta")
    with triton_on_cpu():
        assert triton_kernel("made_up", CPU_TENSOR) is kernel
        assert triton_kernel("made_up", meta) is None
        with triton_on_cpu():
            pass
        assert triton_kernel("made_up", CPU_TENSOR) is kernel
    assert triton_kernel("made_up", CPU_TENSOR) is None


@pytest.mark.parametrize(
    ("has_triton", "capability", "can_run"),
    [(True, (8, 0), True), (True, (9, 0), True), (True, (7, 5), False), (False, (9, 0), False)],
)
def test_older_devices_and_machines_without_triton_compute_with_torch(
    has_triton: bool, capability: tuple[int, int], can_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection.importlib.util, "find_spec", lambda name: object() if has_triton else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert selection._can_run.__wrapped__(torch.device("cuda", 0)) is can_run


FLAGS = {
    "avx2": "avx2 fma f16c",
    "avx512": "avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_vbmi2 avx512_bf16",
    "amx": "amx_tile amx_bf16 amx_int8",
}


@pytest.mark.parametrize(
    ("has", "may_use_amx", "widest", "levels"),
    [
        (["avx2", "avx512", "amx"], True, "", ("amx", "avx512", "avx2")),
        (["avx2", "avx512", "amx"], False, "", ("avx512", "avx2")),
        (["avx2", "avx512", "amx"], True, "avx512", ("avx512", "avx2")),
        (["avx2", "avx512", "amx"], True, "avx2", ("avx2",)),
        (["avx2", "avx512"], True, "amx", ("avx512", "avx2")),
        (["avx2"], True, "", ("avx2",)),
        (["avx512", "amx"], True, "", ()),
        ([], True, "", ()),
    ],
)
def test_the_levels_are_those_whose_instructions_are_all_there(
    has: list[str], may_use_amx: bool, widest: str, levels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"processor : 0\nflags\t\t: fpu {' '.join(FLAGS[name] for name in has)} sse\nbugs : none\n"
    monkeypatch.setattr(library, "Path", lambda path: SimpleNamespace(read_text=lambda **_: text))
    monkeypatch.setattr(library, "_may_use_amx", lambda: may_use_amx)
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("PAGODA_CPU_LEVEL", widest)
    assert library.cpu_levels.__wrapped__() == levels
    monkeypatch.setattr(library.platform, "machine", lambda: "aarch64")
    assert library.cpu_levels.__wrapped__() == ()


@pytest.mark.parametrize("missing", [flag for flags in FLAGS.values() for flag in flags.split()])
def test_one_missing_instruction_is_one_level_less(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [flag for each in FLAGS.values() for flag in each.split() if flag != missing]
    monkeypatch.setattr(
        library, "Path", lambda path: SimpleNamespace(read_text=lambda **_: f"flags : {' '.join(flags)}")
    )
    monkeypatch.setattr(library, "_may_use_amx", lambda: True)
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("PAGODA_CPU_LEVEL", raising=False)
    level = next(name for name, each in FLAGS.items() if missing in each.split())
    expected = {"avx2": (), "avx512": ("avx2",), "amx": ("avx512", "avx2")}[level]
    assert library.cpu_levels.__wrapped__() == expected


def test_a_library_is_named_by_its_level_and_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "one.cpp").write_text("1")
    (sources / "two.h").write_text("2")
    monkeypatch.setattr(library, "SOURCES", sources)
    first = library.library_path("avx2", tmp_path / "cache")
    assert first.parent.parent == tmp_path / "cache"
    assert (first.name, first.parent.name[:5], len(first.parent.name)) == ("pagoda_native.so", "avx2-", 21)
    assert library.library_path("amx", tmp_path / "cache") != first
    (sources / "notes.md").write_text("no source")
    assert library.library_path("avx2", tmp_path / "cache") == first
    (sources / "two.h").write_text("3")
    assert library.library_path("avx2", tmp_path / "cache") != first


def test_a_library_is_for_one_torch_one_python_and_one_layout_of_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "csrc"
    (sources / "linear").mkdir(parents=True)
    (sources / "one.cpp").write_text("1")
    monkeypatch.setattr(library, "SOURCES", sources)
    first = library.library_path("avx2", tmp_path)
    for owner, name in ((torch, "__version__"), (sys.implementation, "cache_tag")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, "another one")
            assert library.library_path("avx2", tmp_path) != first, name
        assert library.library_path("avx2", tmp_path) == first
    (sources / "one.cpp").rename(sources / "linear" / "one.cpp")
    moved = library.library_path("avx2", tmp_path)
    (sources / "linear" / "one.cpp").rename(sources / "linear" / "two.cpp")
    assert len({first, moved, library.library_path("avx2", tmp_path)}) == 3


def test_compiled_kernels_are_kept_in_the_user_s_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert library.default_cache_directory() == Path("/cache/pagoda/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/me")
    assert library.default_cache_directory() == Path("/home/me/.cache/pagoda/kernels")


def test_instructions_have_other_names_for_the_compiler() -> None:
    names = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
    assert [build._flag(name) for name in names] == ["-mavx2", "-mavx512f", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"]


def reference_philox(seed: int, offset: int) -> list[int]:
    """Philox4x32-10 in Python's integers."""
    words = [offset & 0xFFFFFFFF, offset >> 32, 0, 0]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            second >> 32 ^ words[1] ^ key[0],
            second & 0xFFFFFFFF,
            first >> 32 ^ words[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return words


@pytest.mark.parametrize(
    ("seed", "offset"), [(0, 0), (1, 0), (0, 1), (2**32, 0), (0, 2**32), (2**64 - 1, 2**40 + 7), (123, 456)]
)
def test_random_bits_are_philox_s(seed: int, offset: int) -> None:
    seeds, offsets = np.array([5, seed], dtype=np.uint64), np.array([6, offset], dtype=np.uint64)
    words = reference_philox(seed, offset)
    assert philox4x32(seeds, offsets)[:, 1].tolist() == words
    assert int(philox_keys(seeds, offsets).view(np.uint64)[1]) == words[0] | words[1] << 32


def test_tables_of_a_batch_have_its_bounds() -> None:
    blocks = np.arange(8, dtype=np.int32).reshape(4, 2)
    tables = make_tables(np.array([1, 5, 1, 3]), np.array([9, 5, 7, 20]), blocks, torch.device("cpu"))
    assert tables.query_start_loc.tolist() == [0, 1, 6, 7, 10]
    assert (tables.seq_lens.tolist(), tables.block_table.tolist()) == ([9, 5, 7, 20], blocks.tolist())
    assert {each.dtype for each in (tables.query_start_loc, tables.seq_lens, tables.block_table)} == {torch.int32}
    assert (tables.num_singles, tables.max_query_len, tables.max_single_len) == (2, 5, 9)
    none = make_tables(np.array([2]), np.array([4]), blocks[:1], torch.device("cpu"))
    assert (none.num_singles, none.max_query_len, none.max_single_len) == (0, 2, 0)
