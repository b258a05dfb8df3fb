"""Stored tensors: what a checkpoint of any kind offers to those who load, convert or verify it."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np

Index = tuple[slice, ...]
T = TypeVar("T")

# At most what the allocator keeps for the next block, so that its pages are not made anew.
BLOCK_BYTES = 32 << 20

# Of weights as they are, and of quantized ones too.
DTYPES = ("bfloat16", "float32", "float16")
STORED_DTYPES = (*DTYPES, "int8")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Attributes:
      name: its name, Hugging Face's.
      shape: its shape, as Hugging Face stores it: torch layout, unpadded.
      dtype: numpy name of its dtype.
      read: reads a part of it, given a slice per dimension, without reading the rest.
      rows: rows of the leading dimension that are stored or verified together.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Index], np.ndarray]
    rows: int = 1

    @property
    def bytes(self) -> int:
        """Size of its data."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def whole(self) -> np.ndarray:
        """All of it, read in blocks, so that reading holds little beside the result."""
        out = np.empty(self.shape, self.dtype)
        for block in self.blocks():
            out[block] = self.read(block)
        return out

    def blocks(self, rows: int = 1) -> list[Index]:
        """Parts of whole rows, in order, that make up the whole.

        They have some :data:`BLOCK_BYTES` each, or more where more rows belong together: their number is a multiple of
        ``rows`` and of the tensor's own, or all there are.
        """
        unit = math.lcm(rows, self.rows)
        row_bytes = max(1, self.bytes // self.shape[0])
        step = max(1, BLOCK_BYTES // (unit * row_bytes)) * unit
        rest = tuple(slice(0, size) for size in self.shape[1:])
        return [(slice(first, min(first + step, self.shape[0])), *rest) for first in range(0, self.shape[0], step)]


class BytesRead:
    """Counts the bytes that are read from a checkpoint's tensors, by any thread.

    Attributes:
      total: so far.
    """

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count some more."""
        with self._lock:
            self.total += count


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of an open checkpoint.

    Attributes:
      by_name: every tensor, each name's copies in a list; more than one are duplicates.
      claims: names that an index says exist.
      bytes_read: counts what is read of them.
    """

    by_name: dict[str, list[StoredTensor]]
    claims: frozenset[str] = frozenset()
    bytes_read: BytesRead = field(default_factory=BytesRead)

    def __getitem__(self, name: str) -> StoredTensor:
        return self.by_name[name][0]

    @property
    def bytes(self) -> int:
        """Size of all data."""
        return sum(copies[0].bytes for copies in self.by_name.values())


def read_ahead(reads: Iterable[Callable[[], T]], readers: int = 1) -> Iterator[T]:
    """The results of calls, in order, made in threads a few ahead of who takes them."""
    with ThreadPoolExecutor(readers) as pool:
        pending: deque[Future[T]] = deque()
        try:
            for read in reads:
                pending.append(pool.submit(read))
                if len(pending) > readers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for waiting in pending:
                waiting.cancel()
