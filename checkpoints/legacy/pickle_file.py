"""The legacy weight file, a pickled ``params.pkl``, indexed without being unpickled.

A pickle is a program for a stack machine, and the program may call anything. :mod:`checkpoints.legacy.walker` walks
over its opcodes in a memory map, with symbols instead of objects. No name is imported or looked up, nothing is called,
and the bytes of arrays are skipped. It reads what pickle writes, with protocols 3, 4 and 5, for dicts and Flax
``FrozenDict`` of JAX and NumPy arrays. Anything else is an error; there is no fallback to unpickling.

Protocols 2 and older are refused: they store an array's bytes as UTF-8 text, which would have to be decoded.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from checkpoints.legacy.symbols import DTYPES, REMEDY, LegacyPickleError, LegacyTensor
from checkpoints.legacy.walker import walk


class LegacyPickle:
    """A pickled weight file whose arrays can be read one by one: ``with LegacyPickle(path) as weights:``.

    The file is indexed without being unpickled.

    The file must not be shortened while it is open: reading a memory map past the end of its file kills the process.

    Attributes:
      tensors: all arrays by path, in the file's order.

    Raises:
      LegacyPickleError: the file cannot be opened, is damaged, or contains something other than nested dicts of
        arrays. The message says where, and what was expected.
    """

    def __init__(self, path: Path) -> None:
        # Checked first, because opening a pipe would wait for its writer.
        if not path.is_file():
            raise LegacyPickleError(f"{path}: there is no such file")
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise LegacyPickleError(f"{path}: cannot be read ({error}); {REMEDY}") from error
        try:
            # Only the pages between arrays are read, so the system should not read ahead.
            self._advise("MADV_RANDOM")
            self.tensors = walk(self._data, str(path))
            self._advise("MADV_NORMAL")
        except BaseException:
            self.close()
            raise

    def _advise(self, advice: str, start: int = 0, length: int | None = None) -> None:
        if hasattr(mmap, advice):  # not on every system
            self._data.madvise(getattr(mmap, advice), start, len(self._data) if length is None else length)

    def read(self, path: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Copy a part of an array in C order, and release the memory-mapped pages of the array.

        Args:
          path: path of the array.
          index: one slice for each leading dimension; by default the whole array.

        Raises:
          LegacyPickleError: there is no such array.
        """
        if path not in self.tensors:
            raise LegacyPickleError(f'there is no array "{path}" in the pickle')
        tensor = self.tensors[path]
        axes = tensor.axes or range(len(tensor.shape))
        stored_shape = [tensor.shape[list(axes).index(axis)] for axis in range(len(tensor.shape))]
        stored: np.ndarray = np.ndarray(
            stored_shape, DTYPES[tensor.dtype], self._data, tensor.offset, order="F" if tensor.order == "F" else "C"
        )
        place: Any = (*index, ...)  # with ..., a single element is an array too
        part = stored.transpose(*axes)[place].copy(order="C")
        if tensor.nbytes:
            start = tensor.offset - tensor.offset % mmap.PAGESIZE
            self._advise("MADV_DONTNEED", start, tensor.offset + tensor.nbytes - start)
        return part

    def close(self) -> None:
        """Close the memory map."""
        self._data.close()

    def __enter__(self) -> LegacyPickle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def index_pickle(path: Path) -> dict[str, LegacyTensor]:
    """List all arrays of a legacy file by path, in the file's order, without reading any of them.

    Raises:
      LegacyPickleError: see :class:`LegacyPickle`.
    """
    with LegacyPickle(path) as weights:
        return weights.tensors
