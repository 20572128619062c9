"""A copy of Triton, and of our kernels, that runs in Triton's interpreter, beside whatever else the process imported.

Triton decides at import whether it interprets. Other tests of the process (transformers imports Triton, say) should
neither decide that nor find interpreted kernels.
"""

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pagoda_kernels.triton
from benchmarks.gpu.interpreter import spare_work
from pagoda_kernels import selection

_copies: dict[str, ModuleType] = {}


def _is_affected(name: str) -> bool:
    if name.startswith("triton._C"):
        return False  # compiled code: can be loaded only once, and interprets nothing
    return name == "triton" or name.startswith(("triton.", "pagoda_kernels.triton."))


def _swap(modules: dict[str, ModuleType]) -> dict[str, ModuleType]:
    """Put `modules` in the place of all affected ones, which are returned."""
    found = {name: module for name, module in sys.modules.items() if _is_affected(name)}
    for name in found:
        del sys.modules[name]
    sys.modules.update(modules)
    return found


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Within: `import triton` finds the interpreting copy, and CPU tensors go to our Triton kernels."""
    others = _swap(_copies)
    selection._load.cache_clear()
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        if not _copies:
            spare_work(importlib.import_module("triton.runtime.interpreter"))
        for module in pkgutil.iter_modules(pagoda_kernels.triton.__path__, "pagoda_kernels.triton."):
            importlib.import_module(module.name)
        with selection.triton_on_cpu():
            yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
        _copies.update(_swap(others))
        selection._load.cache_clear()
