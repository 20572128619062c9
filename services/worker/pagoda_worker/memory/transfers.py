"""Copies between host and device.

For a CUDA device they use pinned memory, so that launching does not wait. On a CPU nothing is copied.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

AnyArray: TypeAlias = npt.NDArray[Any]


def to_device(array: AnyArray, device: torch.device) -> Tensor:
    """The array on a device, for later work on the current stream."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    # torch keeps the pinned memory until the copy is done, and then for the next one.
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> tuple[AnyArray, ...]:
    """Tensors of one device on the host. All copies are launched before a single wait."""
    return HostCopies(*tensors).wait()


class HostCopies:
    """Tensors of one device that are being copied to the host, after earlier work of the current stream.

    The wait is for an event, which torch.cuda.set_sync_debug_mode allows: nothing else on a step's path waits.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = tensors
        self._done: torch.cuda.Event | None = None
        device = tensors[0].device
        if device.type == "cpu":
            return
        self._copies = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors)
        for copied, tensor in zip(self._copies, tensors, strict=True):
            copied.copy_(tensor, non_blocking=True)
        self._done = new_event()
        self._done.record(torch.cuda.current_stream(device))

    def wait(self) -> tuple[AnyArray, ...]:
        """The tensors, in their order."""
        if self._done is not None:
            self._done.synchronize()
        return tuple(copied.numpy() for copied in self._copies)


class Upload:
    """Words that the host writes and sends to the device in one copy.

    One caller at a time: `begin`, write, `send`, let the current stream read, `release`.

    On CUDA the copy runs on a separate stream. It begins when `release` says that the previous words are no longer
    read, and work on the current stream after `send` waits for it; the host waits only for its own last copy.
    """

    def __init__(self, *, num_words: int, device: torch.device) -> None:
        """`num_words`: maximum number of 64-bit words."""
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(num_words, dtype=torch.int64, pin_memory=is_cuda)
        self._target = torch.zeros(num_words, dtype=torch.int64, device=device) if is_cuda else self._host
        self._stream = _CopyStream(device) if is_cuda else None

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return 0 if self._stream is None else self._target.nbytes

    def begin(self) -> npt.NDArray[np.int64]:
        """[num_words] to write into, with its previous content."""
        if self._stream is not None:
            self._stream.wait_for_copy()
        words: npt.NDArray[np.int64] = self._host.numpy()
        return words

    def send(self, num_words: int) -> Tensor:
        """[num_words] int64, the first words on the device, for what the current stream does next."""
        if self._stream is not None:
            self._stream.copy(self._target[:num_words], self._host[:num_words])
        return self._target[:num_words]

    def release(self) -> None:
        """All readers of the words have been launched on the current stream."""
        if self._stream is not None:
            self._stream.release()


class Download:
    """Integers that the device sends, for the host to read later.

    One caller at a time: `send`, then `wait`. On CUDA they are copied to pinned memory, after earlier work of the
    current stream; the host waits for an event.
    """

    def __init__(self, *, num_words: int, device: torch.device) -> None:
        """`num_words`: maximum number of 64-bit words."""
        is_cuda = device.type == "cuda"
        self._device = device
        self._host = torch.zeros(num_words, dtype=torch.int64, pin_memory=is_cuda)
        self._sent = new_event() if is_cuda else None
        self._num_words = 0

    @property
    def is_there(self) -> bool:
        """Whether `wait` would return at once."""
        return self._sent is None or bool(self._sent.query())  # type: ignore[no-untyped-call]  # torch: it has no types

    def send(self, words: Tensor) -> None:
        """Send [n] int64 of the device. Later changes on the current stream have no effect."""
        self._num_words = words.numel()
        self._host[: self._num_words].copy_(words, non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._device))

    def wait(self) -> npt.NDArray[np.int64]:
        """Wait for the [n] integers that were sent last."""
        if self._sent is not None:
            self._sent.synchronize()
        words: npt.NDArray[np.int64] = self._host[: self._num_words].numpy().copy()
        return words


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A new side stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch: its constructor has no types


def new_event() -> torch.cuda.Event:
    """A new event of the current device, not recorded yet."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch: its constructor has no types


class _CopyStream:
    """A side stream, and the events that order it with the computing stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = new_stream(device)
        self._copied = new_event()
        self._released = new_event()
        self.release()  # the target was just filled with zeros by the current stream

    def wait_for_copy(self) -> None:
        self._copied.synchronize()

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._stream.wait_event(self._released)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._copied.record(self._stream)
        torch.cuda.current_stream(self._device).wait_event(self._copied)

    def release(self) -> None:
        self._released.record(torch.cuda.current_stream(self._device))
