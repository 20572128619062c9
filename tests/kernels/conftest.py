"""Kernels are tested in one process with workers, which leave their choice of kernels behind."""

from collections.abc import Iterator

import pytest

from pagoda_kernels.selection import use_references


@pytest.fixture(autouse=True)
def every_kernel_is_on() -> Iterator[None]:
    use_references(())
    yield
    use_references(())
