"""Parts of parameters, and how each is read: to a buffer, to where it stays, or some rows at a time into the form that
a kernel reads. Knows tensors of files; no models."""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from torch import Tensor

from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix
from pagoda_kernels.linear.scaled_matrix import ScaledMatrix
from pagoda_worker.loader.read_buffers import ReadBuffers
from pagoda_worker.loader.stored import Stored, StoredMatrix, StoredTensor
from pagoda_worker.loader.tensor_file import DTYPES
from pagoda_worker.models.linear_method import SINK_ROWS, RowSink
from pagoda_worker.models.weights import WeightSource

PART_BYTES = 16 << 20
"""Larger tensors are read by several threads, where nothing waits for the whole."""
CHUNK_BYTES = 1 << 20
"""Rows that a thread reads before it packs them: they are still in its cache then."""


class InBuffers(NamedTuple):
    """What is read into memory that is given back after its use, where it is one tensor."""

    stored: Stored
    buffers: ReadBuffers

    @property
    def num_bytes(self) -> int:
        """In the files."""
        return self.stored.num_bytes

    @property
    def held_bytes(self) -> int:
        """Memory until its use."""
        return self.stored.num_bytes

    def read(self) -> Tensor | QuantizedMatrix:
        """The tensor, in host memory."""
        if isinstance(self.stored, StoredTensor) and not self.stored.paired_rows:
            return self.stored.file.read(self.stored.stored_name, self.buffers)
        return self.stored.read()


class InScaled(NamedTuple):
    """A quantized matrix that may stay small floats with scales."""

    stored: StoredMatrix

    @property
    def num_bytes(self) -> int:
        """In the files."""
        return self.stored.num_bytes

    @property
    def held_bytes(self) -> int:
        """Memory until its use."""
        return self.stored.num_bytes

    def read(self) -> Tensor | QuantizedMatrix | ScaledMatrix:
        """The matrix, in host memory."""
        return self.stored.read_scaled()


class InPlace(NamedTuple):
    """What is read to where it stays."""

    stored: StoredTensor
    first_byte: int
    """Of the tensor."""
    target: Tensor
    """Contiguous, in host memory."""

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return self.target.nbytes

    @property
    def held_bytes(self) -> int:
        """Memory until its use, besides that where it stays."""
        return 0

    def read(self) -> None:
        """Have it there."""
        self.stored.file.read_into(self.stored.stored_name, self.target, self.first_byte)


class InRows(NamedTuple):
    """Rows that a sink takes, as many at a time as stay in a core's cache."""

    stored: StoredTensor
    rows: range
    """Of the tensor."""
    row_start: int
    """Row of the matrix that is the tensor's first one."""
    sink: RowSink
    buffers: ReadBuffers

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return len(self.rows) * self.stored.row_bytes

    @property
    def held_bytes(self) -> int:
        """Memory until its use, besides that where it stays."""
        return 0

    def read(self) -> None:
        """Have them taken."""
        stored, row_bytes = self.stored, self.stored.row_bytes
        at_once = max(1, CHUNK_BYTES // (SINK_ROWS * row_bytes)) * SINK_ROWS
        buffer = self.buffers.take(min(at_once, len(self.rows)) * row_bytes)
        try:
            for first in range(self.rows.start, self.rows.stop, at_once):
                num_rows = min(at_once, self.rows.stop - first)
                chunk = buffer[: num_rows * row_bytes]
                stored.file.read_into(stored.stored_name, chunk, first * row_bytes)
                self.sink.fill(chunk.view(DTYPES[stored.dtype]).view(num_rows, -1), self.row_start + first)
        finally:
            self.buffers.give_back(buffer)


Reading: TypeAlias = InBuffers | InScaled | InPlace | InRows


class ReadPart(NamedTuple):
    """A part that was read."""

    source: WeightSource
    value: Tensor | QuantizedMatrix | ScaledMatrix | None
    """None: it is where it stays."""
    num_bytes: int
    """In the files."""
    is_last: bool
    """All of the source was read."""


class Part(NamedTuple):
    """A part that is to be read, for `read_ahead`."""

    source: WeightSource
    reading: Reading
    is_last: bool
    """It ends its source."""

    @property
    def num_bytes(self) -> int:
        """Memory until its use."""
        return self.reading.held_bytes

    def read(self) -> ReadPart:
        """It, and what it is."""
        return ReadPart(self.source, self.reading.read(), self.reading.num_bytes, self.is_last)


def rows_of_parts(stored: StoredTensor) -> Iterator[range]:
    """All rows of a tensor, in parts of whole panels that several threads may read."""
    num_rows = stored.shape[0]
    at_once = max(1, PART_BYTES // max(1, SINK_ROWS * stored.row_bytes)) * SINK_ROWS
    for first in range(0, max(1, num_rows), at_once):
        yield range(first, min(first + at_once, num_rows))
