"""The legacy weight file, a pickled ``params.pkl``, indexed without being unpickled.

A pickle is a program for a stack machine that may call anything. Its opcodes are walked over a memory map with symbols
in the place of objects: an array is "these bytes, this shape, this dtype", a global is a name on a list. No name is
imported or looked up, nothing is called, and the bytes of arrays are skipped. Files are read that pickle writes for
dicts and Flax ``FrozenDict`` of JAX and numpy arrays, protocols 3, 4 and 5. Anything else is an error; there is no
fallback to unpickling.

Protocol 2 and older are refused: they hold an array's bytes as UTF-8 text, so that none of its bytes has a known
place in the file and every one would have to be decoded.

The walk itself is :mod:`checkpoints.legacy.walker`.
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
    """An indexed legacy file, whose arrays are read one by one: ``with LegacyPickle(path) as weights:``.

    The file must not be shortened while it is open: reading a memory map past the end of its file kills the process.

    Attributes:
      tensors: every array by its path, in the file's order.

    Raises:
      LegacyPickleError: the file cannot be opened, is damaged, or is anything but nested dicts of arrays. Says where,
        and what would be right.
    """

    def __init__(self, path: Path) -> None:
        # Asked first: opening a pipe would wait for its writer.
        if not path.is_file():
            raise LegacyPickleError(f"{path}: there is no such file")
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise LegacyPickleError(f"{path}: cannot be read ({error}); {REMEDY}") from error
        try:
            # Only the pages between payloads are touched: no reading ahead.
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
        """A copy of one part of one array, C-ordered; its pages of the map are given back.

        Args:
          path: of the array.
          index: a slice for each leading dimension; default the whole array.

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
        """Give the memory map back."""
        self._data.close()

    def __enter__(self) -> LegacyPickle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def index_pickle(path: Path) -> dict[str, LegacyTensor]:
    """Every array of a legacy file by its path, in the file's order, without reading any of them.

    Raises:
      LegacyPickleError: see :class:`LegacyPickle`.
    """
    with LegacyPickle(path) as weights:
        return weights.tensors
