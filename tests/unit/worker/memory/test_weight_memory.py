"""Memory of weights: tensors of their own in slabs, in huge pages where the machine has them."""

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pagoda_worker.memory.huge_pages import PAGE_BYTES
from pagoda_worker.memory.weight_memory import ALIGNMENT, SLAB_BYTES, WeightMemory

IN_HUGE_PAGES = """
import re, sys
from pathlib import Path
import torch
from pagoda_worker.memory.weight_memory import WeightMemory

setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
if not setting.exists() or "[never]" in setting.read_text():
    sys.exit("this machine gives no huge pages")
memory = WeightMemory()
tensors = [memory.take((1 << 20,), torch.uint8).fill_(7) for _ in range(16)]
begin = tensors[0].data_ptr()
for block in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
    low, high = (int(number, 16) for number in block.split(" ", 1)[0].split("-"))
    if low <= begin < high:
        huge_bytes = int(re.search(r"AnonHugePages:\\s+(\\d+) kB", block)[1]) << 10
if huge_bytes == 0:
    sys.exit("this machine gives no huge pages")
assert huge_bytes == 16 << 20, huge_bytes
"""
"""In a process of its own: in one that has run other tests for long, the kernel may find no huge page."""


def test_small_tensors_share_huge_pages() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", IN_HUGE_PAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)
    if "gives no huge pages" in done.stderr:
        pytest.skip("this machine gives no huge pages")
    assert done.returncode == 0, done.stderr


def test_tensors_of_several_threads_share_no_byte() -> None:
    memory = WeightMemory()
    sizes = [1 + 997 * number for number in range(200)]
    with ThreadPoolExecutor(8) as threads:
        tensors = list(threads.map(lambda size: memory.take((size,), torch.uint8), sizes))
    assert [tensor.shape for tensor in tensors] == [(size,) for size in sizes]
    places = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    assert all(begin % ALIGNMENT == 0 for begin, _ in places)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))


def test_a_tensor_has_its_shape_and_type() -> None:
    memory = WeightMemory()
    for shape, dtype in (((3, 5), torch.bfloat16), ((), torch.float32), ((0, 7), torch.int8), ((4,), torch.float64)):
        tensor = memory.take(shape, dtype)
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()


def test_slabs_end_with_their_tensors_and_large_tensors_have_their_own() -> None:
    memory = WeightMemory()
    first, second = (memory.take((SLAB_BYTES // 2,), torch.uint8) for _ in range(2))
    third = memory.take((1,), torch.uint8)
    large = memory.take((SLAB_BYTES // 2 + 1,), torch.uint8)
    fourth = memory.take((1,), torch.uint8)
    slabs = [tensor.untyped_storage().data_ptr() for tensor in (first, second, third, large, fourth)]
    assert slabs[0] == slabs[1]
    assert slabs[2] == slabs[4]
    assert len(set(slabs)) == 3
    assert first.data_ptr() % PAGE_BYTES == large.data_ptr() % PAGE_BYTES == 0
