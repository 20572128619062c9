"""Parts of parameters, read in one of three ways: into a buffer, into the final memory, or by rows into a kernel's
form. Knows tensors of files; no models."""

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
"""Bytes above which a tensor is read by several threads, if nothing needs the whole."""
CHUNK_BYTES = 1 << 20
"""Number of rows that a thread reads before it packs them, while they are still in its cache."""


class InBuffers(NamedTuple):
    """A part that is read into temporary memory."""

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
    """A quantized matrix that may be kept as small floats with scales."""

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
    """A part that is read into its final memory."""

    stored: StoredTensor
    first_byte: int
    """Of the tensor."""
    target: Tensor
    """Contiguous target in host memory."""

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return self.target.nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes of temporary memory, besides the final memory."""
        return 0

    def read(self) -> None:
        """Read the part."""
        self.stored.file.read_into(self.stored.stored_name, self.target, self.first_byte)


class InRows(NamedTuple):
    """Rows that are given to a sink, as many at a time as fit a core's cache."""

    stored: StoredTensor
    rows: range
    """Of the tensor."""
    row_start: int
    """Row of the matrix for the tensor's first row."""
    sink: RowSink
    buffers: ReadBuffers

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return len(self.rows) * self.stored.row_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of temporary memory, besides the final memory."""
        return 0

    def read(self) -> None:
        """Read the rows into the sink."""
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
    """None: it was read into its final memory."""
    num_bytes: int
    """In the files."""
    is_last: bool
    """Whether the whole source was read."""


class Part(NamedTuple):
    """A part to read, for `read_ahead`."""

    source: WeightSource
    reading: Reading
    is_last: bool
    """Whether it is the last part of its source."""

    @property
    def num_bytes(self) -> int:
        """Memory until its use."""
        return self.reading.held_bytes

    def read(self) -> ReadPart:
        """Read the part and describe it."""
        return ReadPart(self.source, self.reading.read(), self.reading.num_bytes, self.is_last)


def rows_of_parts(stored: StoredTensor) -> Iterator[range]:
    """All rows of a tensor, in parts of whole panels that several threads may read."""
    num_rows = stored.shape[0]
    at_once = max(1, PART_BYTES // max(1, SINK_ROWS * stored.row_bytes)) * SINK_ROWS
    for first in range(0, max(1, num_rows), at_once):
        yield range(first, min(first + at_once, num_rows))
