"""What adapters of low rank add, held against PyTorch's; and that a row has the same bits in every batch."""

from collections.abc import Iterator

import torch

from benchmarks.gpu.tools.check import TOLERANCE, Check, Pair
from benchmarks.gpu.tools.lora_case import lora_case
from pagoda_kernels.lora.add_lora import add_lora, add_lora_reference

RANKS = (8, 256, 16, 64, 5, 32, 128, 17)


def adapter_checks(device: torch.device, *, is_small: bool) -> Iterator[Check]:
    """Decodes of eight adapters, and prompts among them."""
    shapes = {"small": (100, (70, 30))} if is_small else {"qkv": (4096, (4096, 1024, 1024)), "odd": (1000, (1500, 70))}
    batches = [(1, 0, 2, 17, 3)] if is_small else [(1,) * 9, (0, 3, 300, 1, 16, 17, 1, 2, 40)]
    for dtype in (torch.bfloat16,) if is_small else tuple(TOLERANCE):
        for name, (num_inputs, sizes) in shapes.items():
            for counts in batches:

                def run(
                    dtype: torch.dtype = dtype,
                    num_inputs: int = num_inputs,
                    sizes: tuple[int, ...] = sizes,
                    counts: tuple[int, ...] = counts,
                ) -> list[Pair]:
                    options = {"ranks": RANKS, "num_inputs": num_inputs, "sizes": sizes, "dtype": dtype}
                    case = lora_case(counts, **options, device=device)
                    expected = case.out.clone()
                    alone = [] if is_small else [case.only(row) for row in range(0, case.x.shape[0], 7)]
                    add_lora(*case)
                    add_lora_reference(case.x, expected, case.rows, case.table)
                    pairs = [Pair(case.out, expected, TOLERANCE[dtype])]
                    for place, one in enumerate(alone):
                        add_lora(*one)
                        pairs.append(Pair(one.out[0], case.out[7 * place], 1e-9))
                    return pairs

                yield Check("add_lora", f"{name} {sum(counts)} tokens {dtype}", run)
