"""Which steps are replayed, at which size, and what stands in the buffers then. Kernels are no part of this."""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pagoda_worker.graphs import cuda_graphs
from pagoda_worker.graphs.cuda_graphs import CudaGraphRecorder, recorded_graphs, why_eager
from pagoda_worker.graphs.decode_buffers import DecodeBuffers
from pagoda_worker.graphs.decode_graphs import DecodeGraphs, Graph, graph_sizes
from pagoda_worker.loader.loaded_model import LoadedModel
from pagoda_worker.memory import transfers
from pagoda_worker.steps.input_batch import ForwardInputs
from tests.unit.worker.driver import Driver

CPU = torch.device("cpu")


def step(num_seqs: int, *, width: int = 3, num_tokens: int | None = None) -> ForwardInputs:
    """`num_seqs` sequences; one token each unless there are more."""
    counts = np.ones(num_seqs, dtype=np.int64)
    counts[:1] += (num_seqs if num_tokens is None else num_tokens) - num_seqs
    tokens = np.arange(int(counts.sum()))
    return ForwardInputs(
        batch_rows=np.arange(num_seqs),
        slots=np.arange(num_seqs),
        num_scheduled_tokens=counts,
        num_draft_tokens=np.zeros(num_seqs, dtype=np.int64),
        seq_lens=np.arange(num_seqs) + 20,
        block_tables=np.arange(num_seqs * width, dtype=np.int32).reshape(1, num_seqs, width) + 7,
        input_ids=tokens + 100,
        positions=tokens + 19,
        slot_mappings=(tokens + 1000)[None],
        is_sampled=np.ones(num_seqs, dtype=np.bool_),
    )


def make_buffers(max_size: int = 6) -> DecodeBuffers:
    return DecodeBuffers(
        max_size=max_size, max_model_len=75, block_size=16, vocab_size=9, dtype=torch.float32, device=CPU
    )


class BrokenRecorder:
    """Records until it is asked once too often."""

    def __init__(self, device: torch.device, num_graphs: int = 2) -> None:
        self._left = num_graphs

    def record(self, run: Callable[[], None]) -> Graph:
        if not self._left:
            raise RuntimeError("operation not permitted when stream is capturing\nand much more")
        self._left -= 1
        return self

    def replay(self) -> None:
        raise AssertionError("it was not asked for")


def loaded_tiny(**changes: Any) -> LoadedModel:
    loaded = Driver("pagoda-tiny", num_blocks=4, max_num_seqs=6).worker._loaded_model()
    return dataclasses.replace(loaded, **changes)


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (64, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
    ],
)
def test_sizes_rise_to_the_most_sequences_of_a_batch(max_num_seqs: int, expected: list[int]) -> None:
    assert graph_sizes(max_num_seqs) == expected


def test_batches_of_thousands_have_no_graphs() -> None:
    assert graph_sizes(4000)[-2:] == [504, 512]


def test_a_step_of_one_token_each_takes_the_next_size_and_any_other_step_none() -> None:
    loaded = loaded_tiny()
    graphs = DecodeGraphs(
        model=loaded.model,
        kv_cache=loaded.make_cache(num_blocks=2),
        buffers=make_buffers(24),
        sizes=graph_sizes(24),
        recorder=BrokenRecorder(CPU),
    )
    taken = {n: graphs.size_for(step(n), n) for n in (1, 2, 3, 4, 5, 8, 9, 17, 24)}
    assert taken == {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 16, 17: 24, 24: 24}
    assert graphs.size_for(step(25), 25) == 0, "more than the largest"
    assert graphs.size_for(step(3, num_tokens=9), 3) == 0, "a prompt among them"
    assert graphs.size_for(step(3), 2) == 0, "a prompt's chunk of one token, which samples nothing"
    assert graphs.size_for(step(2, num_tokens=5), 5) == 0, "a draft"


def test_padding_writes_to_no_slot_and_belongs_to_no_sequence() -> None:
    buffers = make_buffers()
    assert buffers.slot_mapping.tolist() == [-1] * 6, "a graph may be recorded before the first step"
    buffers.fill(step(6), 6)
    buffers.fill(step(5), 6)
    buffers.fill(step(2), 4)
    tables = buffers.plan(4).tables()
    assert buffers.input_ids[:4].tolist() == [100, 101, 0, 0]
    assert buffers.positions[:4].tolist() == [19, 20, 0, 0]
    assert buffers.slot_mapping[:4].tolist() == [1000, 1001, -1, -1]
    assert tables.query_start_loc.tolist() == [0, 1, 2, 2, 2]
    assert tables.seq_lens.tolist() == [20, 21, 0, 0]
    assert tables.block_table.shape == (4, 5)
    assert tables.block_table[:2, :3].tolist() == [[7, 8, 9], [10, 11, 12]]
    assert (tables.num_singles, tables.max_query_len, tables.max_single_len) == (4, 1, 75)


def test_a_step_stands_where_the_one_before_stood() -> None:
    buffers = make_buffers()

    def places() -> list[int]:
        tables = buffers.plan(6).tables()
        tensors = (buffers.input_ids, buffers.positions, buffers.slot_mapping, buffers.logits)
        tensors += (tables.query_start_loc, tables.seq_lens, tables.block_table)
        return [tensor.data_ptr() for tensor in tensors]

    before = places()
    for num_seqs, width in ((1, 1), (6, 5), (3, 2), (5, 5), (1, 3)):
        inputs = step(num_seqs, width=width)
        buffers.fill(inputs, 6)
        assert places() == before
        assert buffers.plan(6).tables().block_table[:num_seqs, :width].tolist() == inputs.block_table.tolist()
        assert buffers.input_ids[:num_seqs].tolist() == inputs.input_ids.tolist()


@pytest.mark.parametrize(("inputs", "size"), [(step(3), 2), (step(3, num_tokens=4), 4), (step(3), 7)])
def test_what_does_not_fit_is_refused(inputs: ForwardInputs, size: int) -> None:
    with pytest.raises(ValueError, match=r"3 sequences with [34] tokens, for a size of"):
        make_buffers().fill(inputs, size)


def test_models_that_cannot_be_recorded_say_why() -> None:
    loaded = loaded_tiny()
    assert why_eager(loaded) == "paged_attention runs as plain PyTorch"
    model = dataclasses.replace(loaded.config.model, enforce_eager=True)
    eager = dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, model=model))
    assert why_eager(eager) == "--enforce-eager"


def test_a_failed_recording_leaves_a_line_in_the_log_and_no_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = loaded_tiny()
    cache = loaded.make_cache(num_blocks=2)
    with caplog.at_level(logging.INFO):
        assert recorded_graphs(loaded, cache, BrokenRecorder) is None
        monkeypatch.setattr(cuda_graphs, "why_eager", lambda loaded: None)
        assert recorded_graphs(loaded, cache, BrokenRecorder) is None
    said = [record.getMessage() for record in caplog.records if record.name == cuda_graphs.__name__]
    assert said == [
        "no CUDA graphs, every step launches its kernels: paged_attention runs as plain PyTorch",
        "no CUDA graphs, every step launches its kernels: RuntimeError: operation not permitted when stream is "
        "capturing",
    ]


def test_every_size_is_recorded_the_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []
    monkeypatch.setattr(cuda_graphs, "why_eager", lambda loaded: None)
    monkeypatch.setattr(DecodeGraphs, "record", lambda self, size: recorded.append(size))
    loaded = loaded_tiny()
    graphs = recorded_graphs(loaded, loaded.make_cache(num_blocks=2), BrokenRecorder)
    assert graphs is not None
    assert recorded == [6, 4, 2, 1]


class FakeCuda:
    """What CudaGraphRecorder and Upload call of torch.cuda, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.current = "main"
        for name in ("graph_pool_handle", "current_stream", "stream", "set_stream", "CUDAGraph", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def graph_pool_handle(self) -> str:
        return "pool"

    def current_stream(self, device: torch.device) -> "FakeStream":
        return FakeStream(self, self.current)

    @contextmanager
    def stream(self, stream: "FakeStream") -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def set_stream(self, stream: "FakeStream") -> None:
        self.current = stream.name

    def CUDAGraph(self) -> BrokenRecorder:
        return BrokenRecorder(CPU)

    @contextmanager
    def graph(self, graph: Graph, *, pool: str, stream: "FakeStream", capture_error_mode: str) -> Iterator[None]:
        """As torch's: a body that fails leaves the stream behind."""
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        self.calls.append("begin")
        before, self.current = self.current, stream.name
        yield
        self.calls.append("end")
        self.current = before


class FakeStream:
    """A stream, or an event, that only tells who waits for whom."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: "FakeStream") -> None:
        self.cuda.calls.append(f"{self.name} waits for {other.name}")

    wait_event = wait_stream

    def record(self, stream: "FakeStream") -> None:
        self.cuda.calls.append(f"{stream.name} records {self.name}")

    def query(self) -> bool:
        self.cuda.calls.append(f"host looks at {self.name}")
        return False

    def synchronize(self) -> None:
        self.cuda.calls.append(f"host waits for {self.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda(monkeypatch)
    names = iter(("copied", "released"))
    for module in (cuda_graphs, transfers):
        monkeypatch.setattr(module, "new_stream", lambda device: FakeStream(fake, "side"))
    monkeypatch.setattr(transfers, "new_event", lambda: FakeStream(fake, next(names)))
    return fake


def test_a_step_runs_before_it_is_recorded_on_the_stream_that_records(cuda: FakeCuda) -> None:
    CudaGraphRecorder(CPU).record(lambda: cuda.calls.append(f"run on {cuda.current}"))
    assert cuda.calls == [
        "side waits for main",
        "run on side",
        "main waits for side",
        "begin",
        "run on side",
        "end",
    ]
    assert cuda.current == "main"


def test_a_recording_that_fails_gives_the_stream_back(cuda: FakeCuda) -> None:
    def run() -> None:
        if "begin" in cuda.calls:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaGraphRecorder(CPU).record(run)
    assert cuda.current == "main"


def test_an_upload_overwrites_nothing_that_is_still_read_or_still_sent(cuda: FakeCuda) -> None:
    stream = transfers._CopyStream(CPU)
    stream.wait_for_copy()
    stream.copy(torch.zeros(2), torch.ones(2))
    cuda.calls.append("main reads")
    stream.release()
    assert cuda.calls == [
        "main records released",
        "host waits for copied",
        "side waits for released",
        "side records copied",
        "main waits for copied",
        "main reads",
        "main records released",
    ]


def test_tokens_that_are_sent_are_waited_for_when_they_are_read(cuda: FakeCuda) -> None:
    download = transfers.Download(num_words=4, device=CPU)
    download._sent = transfers.new_event()
    download.send(torch.tensor([5, 6, 7]))
    assert not download.is_there
    words = download.wait()
    download.send(torch.tensor([8]))
    assert words.tolist() == [5, 6, 7]
    assert download.wait().tolist() == [8]
    assert cuda.calls == [
        "main records copied",
        "host looks at copied",
        "host waits for copied",
        "main records copied",
        "host waits for copied",
    ]


class HostMemory:
    """Torch's functions that make memory, without a device: what is pinned, and where the rest would be."""

    def __init__(self) -> None:
        self.made: list[tuple[bool, str]] = []
        self.cuda = torch.cuda
        self.int64 = torch.int64

    def zeros(self, size: int, *, dtype: torch.dtype, device: Any = CPU, pin_memory: bool = False) -> torch.Tensor:
        self.made.append((pin_memory, torch.device(device).type))
        return torch.zeros(size, dtype=dtype)

    def empty(self, shape: Any, *, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        self.made.append((pin_memory, "cpu"))
        return torch.empty(shape, dtype=dtype)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    made = HostMemory()
    monkeypatch.setattr(transfers, "torch", made)
    return made


def test_words_for_a_device_are_written_in_pinned_memory_and_sent_in_one_copy(
    cuda: FakeCuda, memory: HostMemory
) -> None:
    upload = transfers.Upload(num_words=5, device=torch.device("cuda"))
    assert memory.made == [(True, "cpu"), (False, "cuda")]
    assert upload.num_bytes == 40
    del cuda.calls[:]
    upload.begin()[:] = np.arange(5) + 1
    sent = upload.send(3)
    upload.release()
    assert sent.tolist() == [1, 2, 3]
    assert upload._target.tolist() == [1, 2, 3, 0, 0], "no more than was asked for"
    assert sent.data_ptr() == upload._target.data_ptr() != upload._host.data_ptr()
    assert cuda.calls == [
        "host waits for copied",
        "side waits for released",
        "side records copied",
        "main waits for copied",
        "main records released",
    ]


def test_words_for_a_cpu_are_where_they_are_written(cuda: FakeCuda, memory: HostMemory) -> None:
    upload = transfers.Upload(num_words=2, device=CPU)
    upload.begin()[:] = (7, 8)
    assert upload.send(1).tolist() == [7]
    upload.release()
    assert (memory.made, upload.num_bytes) == ([(False, "cpu")], 0)
    download = transfers.Download(num_words=2, device=torch.device("cuda"))
    assert memory.made[1:] == [(True, "cpu")]
    assert download._sent is not None


class OnDevice:
    """A tensor that is elsewhere."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.device = tensor, torch.device("cuda")
        self.shape, self.dtype = tensor.shape, tensor.dtype


def test_tensors_are_all_on_their_way_before_the_one_wait(
    cuda: FakeCuda, memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = torch.Tensor.copy_

    def copied(target: torch.Tensor, source: Any, *, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking
        cuda.calls.append("copy")
        return copy(target, source.tensor)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    given: Any = (OnDevice(torch.tensor([1.5, 2.5])), OnDevice(torch.tensor([[3]])))
    copies = transfers.HostCopies(*given)
    assert memory.made == [(True, "cpu")] * 2
    assert cuda.calls == ["copy", "copy", "main records copied"]
    assert [one.tolist() for one in copies.wait()] == [[1.5, 2.5], [[3]]]
    assert cuda.calls[3:] == ["host waits for copied"]


def test_tensors_of_a_cpu_are_not_copied(memory: HostMemory) -> None:
    tensor = torch.tensor([1, 2])
    (array,) = transfers.to_host(tensor)
    assert array.ctypes.data == tensor.data_ptr()
    assert memory.made == []


def layer(*, head_dim: int = 64, latent_rank: int = 0, chunk: int | None = None) -> Any:
    return SimpleNamespace(head_dim=head_dim, latent_rank=latent_rank, chunk=chunk)


def loaded_of(layers: list[Any], **more: Any) -> Any:
    """What is asked of a loaded model of 100 tokens before graphs are recorded."""
    fields: dict[str, Any] = {"world_size": 1, "waits": None, "groups": 1, "recurrent": (), **more}
    return SimpleNamespace(
        config=SimpleNamespace(model=SimpleNamespace(enforce_eager=False)),
        layout=SimpleNamespace(groups=[None] * fields["groups"], recurrent=fields["recurrent"]),
        model=SimpleNamespace(attention_layers=layers, what_waits=fields["waits"]),
        parallel=SimpleNamespace(world_size=fields["world_size"]),
        max_model_len=100,
        dtype=torch.float32,
        device=CPU,
    )


@pytest.mark.parametrize(
    ("loaded", "reason"),
    [
        (loaded_of([layer(), layer(head_dim=256)]), None),
        (loaded_of([]), None),
        (loaded_of([layer()], groups=2), "its layers keep different things"),
        (loaded_of([layer()], groups=0), "its layers keep different things"),
        (loaded_of([layer()], recurrent=(0,)), "its layers keep different things"),
        (loaded_of([layer(), layer(chunk=99)]), "the host works out which chunk a query sees"),
        (loaded_of([layer(), layer(chunk=100)]), None),
        (loaded_of([layer()], world_size=2), "its ranks sum over NCCL"),
        (loaded_of([layer()], waits="a router waits"), "a router waits"),
        (loaded_of([layer(), layer(head_dim=257)]), "attention with head_dim 257 runs as PyTorch"),
        (loaded_of([layer(head_dim=576, latent_rank=512)]), None),
    ],
)
def test_what_stands_in_the_way_of_graphs(loaded: Any, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "triton_kernel", lambda operation, tensor: object())
    found = why_eager(loaded)
    assert (found or "").startswith(reason or "")
    assert (found is None) is (reason is None)


@pytest.mark.parametrize(
    ("latent_rank", "missing", "is_named"),
    [
        (0, "paged_attention", True),
        (0, "rope_store", True),
        (0, "mla_attention", False),
        (8, "mla_attention", True),
        (8, "store_kv_cache", True),
        (8, "paged_attention", False),
    ],
)
def test_graphs_need_the_kernels_of_the_model_s_attention(
    latent_rank: int, missing: str, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cuda_graphs, "triton_kernel", lambda operation, tensor: None if operation == missing else object()
    )
    found = why_eager(loaded_of([layer(latent_rank=latent_rank)]))
    assert found == (f"{missing} runs as plain PyTorch" if is_named else None)
