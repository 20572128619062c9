"""Values as bytes, against torch's conversions."""

import sys

import numpy as np
import pytest
import torch

from pagoda_frontend.pooling.binary_values import EmbedDtype, to_bytes

DTYPES: dict[EmbedDtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_are_those_of_torch(dtype: EmbedDtype) -> None:
    values = torch.cat(
        [torch.randn(5000) * 3, torch.randn(2000) * 1e-3, torch.tensor([0.0, -0.0, 1.0, -448.0, 0.0625])]
    )
    # Halves between neighbours of fp8: ties go to the even one.
    values = torch.cat([values, torch.arange(1, 64) / 16 + 1 / 32, torch.arange(64) * 2.0**-10])
    converted = values.to(DTYPES[dtype])
    width = converted.element_size()
    wanted = converted.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[width]).numpy().tobytes()
    assert sys.byteorder == "little"
    assert to_bytes(values.numpy(), dtype, "little") == wanted == to_bytes(values.numpy(), dtype)
    assert to_bytes(values.numpy(), dtype, "native") == wanted
    swapped = np.frombuffer(wanted, dtype=f"u{width}").byteswap().tobytes()
    assert to_bytes(values.numpy(), dtype, "big") == swapped


def test_rows_stand_one_after_the_other() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.frombuffer(to_bytes(values), "<f4").tolist() == [0, 1, 2, 3, 4, 5]
