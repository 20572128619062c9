"""What the figures must reach, and whether they do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.cpu.results import Results
from benchmarks.cpu.shapes import BF16, Roofline, Shape, WeightBytes
from benchmarks.cpu.workloads import Workload

OURS = "pagoda"
IN_PROCESS = "pagoda-in-process"
VLLM = ("vllm", "vllm-eager")
TRANSFORMERS = ("transformers",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """One demand on the figures."""

    text: str
    value: float
    bound: float
    is_at_most: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the value keeps the bound."""
        return self.value <= self.bound if self.is_at_most else self.value >= self.bound


def goals(
    results: Results, shape: Shape, workloads: dict[str, Workload], roofline: Roofline, peers: Sequence[str]
) -> Iterator[Goal]:
    """Every demand that the measured figures can answer."""
    for workload in results.workloads():
        for others, name, bound in (
            (VLLM, "vLLM", 1.5),
            (TRANSFORMERS, "transformers", 2.0),
            (peers, "the best peer", 1.0),
            (peers, "the best peer (must)", 0.85),
        ):
            best = results.best(workload, others)
            ratio = results.ratio(workload, best, OURS) if best else None
            if ratio is not None:
                yield Goal(text=f"{workload}: times as fast as {name} ({best})", value=ratio, bound=bound)
    gap = results.median("W1", OURS, "gap_s")
    if gap is not None:
        text = "W1: fraction of the read limit between tokens"
        yield Goal(text=text, value=read_fraction(shape, workloads["W1"], roofline, gap), bound=0.9)
    for variant, bound in (("pagoda-int8", 1.6), ("pagoda-int4", 2.3)):
        for workload, least in (("W1", bound), ("W2", 1.0)):
            ratio = results.ratio(workload, OURS, variant)
            if ratio is not None:
                yield Goal(text=f"{workload}: {variant}, times as fast as bf16", value=ratio, bound=least)
    computed = prefix_bound_s(results, workloads)
    measured = results.median("W4", OURS)
    if computed is not None and measured is not None:
        text = "W4: time by that of one prefix, the rest and decoding at the rates of W5 and W2"
        yield Goal(text=text, value=measured / computed, bound=1.3, is_at_most=True)
    cost = results.ratio("W3", OURS, IN_PROCESS)
    if cost is not None:
        text = "W3: time of the server by that of the engine in process"
        yield Goal(text=text, value=cost, bound=1.05, is_at_most=True)


def read_fraction(
    shape: Shape, workload: Workload, roofline: Roofline, gap_s: float, weight_bytes: WeightBytes = BF16
) -> float:
    """Bytes that a decode step of W1 must read, by what the machine reads in the median gap."""
    num_cached = workload.prompt_lens[0] + workload.num_outputs // 2
    needed = shape.step_bytes(num_cached=num_cached, weight_bytes=weight_bytes)
    return needed / roofline.read_bytes_per_s / gap_s


def prefix_bound_s(results: Results, workloads: dict[str, Workload]) -> float | None:
    """Seconds that W4 would take with its prefix computed once, by our own rates of W5 (prefill) and W2 (decode)."""
    prefill_s, batch_s = results.median("W5", OURS), results.median("W2", OURS)
    if prefill_s is None or batch_s is None or "W4" not in workloads:
        return None
    one, batch, shared = workloads["W5"], workloads["W2"], workloads["W4"]
    token_s = prefill_s / one.num_prompt_tokens
    step_s = max(0.0, batch_s - token_s * batch.num_prompt_tokens) / (batch.num_outputs - 1)
    num_tokens = shared.prefix_len + sum(length - shared.prefix_len for length in shared.prompt_lens)
    return token_s * num_tokens + step_s * (shared.num_outputs - 1)
