"""Stored tensors: the one form in which loading, conversion, export and verification see checkpoints of all formats."""

from __future__ import annotations

import itertools
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

# Small enough that the allocator reuses the memory of one part for the next.
PART_BYTES = 32 << 20

# Dtypes that weights may have, and those that weights and quantized weights may have. Bytes hold int4 in pairs.
DTYPES = ("bfloat16", "float32", "float16")
STORED_DTYPES = (*DTYPES, "int8", "uint8")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Attributes:
      name: its Hugging Face name.
      shape: its unpadded shape in Hugging Face's layout, which is PyTorch's.
      dtype: NumPy's name of its dtype.
      read: reads a part, given a slice per dimension, without reading the rest.
      rows: number of leading rows that are stored or verified together.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Index], np.ndarray]
    rows: int = 1

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def whole(self) -> np.ndarray:
        """Read all of it in parts, so that little memory is needed besides the result."""
        out = np.empty(self.shape, self.dtype)
        for part in self.parts():
            out[part] = self.read(part)
        return out

    def parts(self, rows: int = 1) -> list[Index]:
        """Split the tensor into consecutive parts of whole rows.

        Each has about :data:`PART_BYTES`, or more if more rows belong together: the number of rows is a multiple of
        ``rows`` and of the tensor's own ``rows``, except in the last part.
        """
        unit = math.lcm(rows, self.rows)
        row_bytes = max(1, self.bytes // self.shape[0])
        step = max(1, PART_BYTES // (unit * row_bytes)) * unit
        rest = tuple(slice(0, size) for size in self.shape[1:])
        return [(slice(first, min(first + step, self.shape[0])), *rest) for first in range(0, self.shape[0], step)]


class BytesRead:
    """Counts the bytes that are read from a checkpoint's tensors. It is thread-safe.

    Attributes:
      total: bytes read so far.
    """

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Add bytes."""
        with self._lock:
            self.total += count


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of an open checkpoint.

    Attributes:
      by_name: for each name, the list of tensors that have it; more than one are duplicates.
      claims: names that the index of a Hugging Face folder lists.
      bytes_read: counts the bytes read.
    """

    by_name: dict[str, list[StoredTensor]]
    claims: frozenset[str] = frozenset()
    bytes_read: BytesRead = field(default_factory=BytesRead)

    def __getitem__(self, name: str) -> StoredTensor:
        return self.by_name[name][0]

    @property
    def bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(copies[0].bytes for copies in self.by_name.values())


@dataclass(frozen=True)
class Limit:
    """A limit on the memory of results that :func:`read_ahead` holds.

    Attributes:
      total: bytes of all results together. A larger result is held alone.
      sizes: bytes of each result, in order.
    """

    total: int
    sizes: Iterable[int]


def read_ahead(reads: Iterable[Callable[[], T]], readers: int = 1, limit: Limit | None = None) -> Iterator[T]:
    """Make calls in threads, a few ahead of their consumer, and yield the results in order.

    Args:
      reads: the calls.
      readers: number of threads.
      limit: limit on the bytes of all results that are being read or wait for the consumer; None for no limit.
    """
    sizes = itertools.repeat(0) if limit is None else iter(limit.sizes)
    with ThreadPoolExecutor(readers) as pool:
        pending: deque[tuple[Future[T], int]] = deque()
        held = 0
        try:
            for read, size in zip(reads, sizes, strict=False):
                while pending and limit is not None and held + size > limit.total:
                    held -= pending[0][1]
                    yield pending.popleft()[0].result()
                pending.append((pool.submit(read), size))
                held += size
                if len(pending) > readers:
                    held -= pending[0][1]
                    yield pending.popleft()[0].result()
            while pending:
                yield pending.popleft()[0].result()
        finally:
            for waiting, _ in pending:
                waiting.cancel()
