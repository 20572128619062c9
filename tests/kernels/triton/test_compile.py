"""Every Triton kernel passes the compiler for GPUs that are not there: what the interpreter lets pass, it may not."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch
from benchmarks.gpu.checks import checks
from tests.kernels.triton.compiled import compiling

torch.empty = torch.zeros  # what no kernel writes here may be looked up as places
SKIPPED = ("float32", "window", "softcap", "300 top_p")  # variants: the compiler takes seconds for some
with compiling(int(sys.argv[1])) as kernels:
    for check in checks(torch.device("cpu"), is_small=True):
        if not any(word in check.case for word in SKIPPED):
            check.run()
names = {kernel.metadata.name for kernel in kernels}
print(*sorted(names))
print(max(kernel.metadata.shared for kernel in kernels))
"""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
KERNELS = {
    "_act_and_mul_kernel",
    "_bitmask_kernel",
    "_copy_kernel",
    "_expand_kernel",
    "_gated_delta_rule_kernel",
    "_grouped_linear_kernel",
    "_grouped_scaled_linear_kernel",
    "_join_latents_kernel",
    "_join_parts_kernel",
    "_logprobs_kernel",
    "_mla_attention_kernel",
    "_paged_attention_kernel",
    "_places_kernel",
    "_penalties_kernel",
    "_quantized_linear_kernel",
    "_rms_norm_kernel",
    "_sample_tokens_kernel",
    "_shrink_kernel",
    "_sizes_kernel",
    "_state_space_scan_kernel",
    "_store_kernel",
}


@pytest.mark.parametrize(("capability", "max_shared_bytes"), [(90, 227 * 1024)])
def test_kernels_compile(capability: int, max_shared_bytes: int) -> None:
    command = [sys.executable, "-c", SCRIPT, str(capability)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    names, shared = result.stdout.splitlines()[:2]
    assert set(names.split()) >= KERNELS
    assert int(shared) <= max_shared_bytes
