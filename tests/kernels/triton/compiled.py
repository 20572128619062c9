"""Compiles Triton kernels for a GPU that is not there: a launch ends with the compiler. Needs a process of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pagoda_kernels import selection


class _NoDevice:
    """What the launcher asks of a driver before it launches."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)  # kernels are kept by device, and targets are ours

    def get_current_stream(self, device: int) -> int:
        return device

    def get_active_torch_device(self) -> str:
        return "cpu"


@contextmanager
def compiling(capability: int) -> Iterator[list[Any]]:
    """Within: CPU tensors go to the Triton kernels, which are compiled for this compute capability and not run.

    Yields:
        The compiled kernels, as they come.
    """
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernels.append(kernel)
        return kernel

    triton.runtime.driver.set_active(_NoDevice(GPUTarget("cuda", capability, 32)))
    JITFunction.run = compile_only
    try:
        with selection.triton_on_cpu():
            yield kernels
    finally:
        JITFunction.run = run
