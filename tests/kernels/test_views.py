"""What does not lie densely in memory is computed as its copy that does."""

from collections.abc import Callable

import pytest
from torch import Tensor

from pagoda_kernels.native.library import load_native
from tests.kernels.view_cases import CASES, VIEWS, check_views


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", CASES)
def test_a_view_is_computed_as_its_copy(name: str, view: Callable[[Tensor], Tensor]) -> None:
    assert load_native()
    check_views(name, view)
