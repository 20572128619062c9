"""Every test here runs the Triton kernels in Triton's interpreter, on CPU tensors."""

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.triton.interpreted import interpreted_kernels


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    torch.manual_seed(0)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the references are a thousand tiny operations, which threads make slower
    with interpreted_kernels():
        yield
    torch.set_num_threads(num_threads)
