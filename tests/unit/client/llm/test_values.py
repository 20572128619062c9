"""Results of pooling are arrays that torch's functions take."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pagoda import PoolingOutput
from pagoda.llm.values import TENSOR_METHODS, Values


def values(*given: float) -> Any:
    return PoolingOutput(np.array(given, np.float32)).data


def test_it_is_an_array() -> None:
    given = values(3, 4)
    assert isinstance(given, np.ndarray)
    assert (given.tolist(), given.shape, given.size, given.sum()) == ([3, 4], (2,), 2, 7)
    np.testing.assert_array_equal(given * 2, [6, 8])
    assert isinstance(given[0], np.float32)


def test_functions_of_torch_take_it() -> None:
    one, other = values(3, 4), values(0, 1)
    assert torch.stack([one, other]).tolist() == [[3, 4], [0, 1]]
    assert torch.cat((one, other)).tolist() == [3, 4, 0, 1]
    torch.testing.assert_close(F.normalize(one, dim=-1), torch.tensor([0.6, 0.8]))
    assert float(F.cosine_similarity(one, torch.tensor([0.0, 1.0]), dim=0)) == pytest.approx(0.8)
    assert torch.allclose(one, torch.tensor([3.0, 4.0]))
    assert torch.tensor(one).tolist() == torch.as_tensor(one).tolist() == [3, 4]


def test_methods_of_tensors_give_tensors() -> None:
    given = values(3, 4)
    for made in (given.detach().clone().cpu().float(), given.to(torch.float64), given.unsqueeze(0)[0]):
        assert isinstance(made, torch.Tensor)
        assert made.tolist() == [3, 4]
    assert (given.dim(), given.is_contiguous(), str(given.device)) == (1, True, "cpu")
    assert isinstance(given.numpy(), np.ndarray)
    assert all(hasattr(torch.Tensor, name) for name in TENSOR_METHODS)
    assert not any(hasattr(np.ndarray, name) for name in TENSOR_METHODS - {"device"})
    with pytest.raises(AttributeError, match="'Values' object has no attribute 'nothing'"):
        given.nothing  # noqa: B018 (the access is the test)


def test_values_that_may_not_be_written_are_copied() -> None:
    given = np.frombuffer(np.array([1, 2], np.float32).tobytes(), np.float32).view(Values)
    made = given.tensor()
    made += 1
    assert given.tolist() == [1, 2]


def test_nothing_imports_torch_before_it_is_asked_for() -> None:
    code = (
        "import sys, numpy as np; from pagoda import PoolingOutput; data = PoolingOutput(np.ones(2, np.float32)).data; "
        "print(data.tolist(), hasattr(data, 'iloc'), 'torch' in sys.modules, data.cpu().tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[1.0, 1.0] False False [1.0, 1.0]"
