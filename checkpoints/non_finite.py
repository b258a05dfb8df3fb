"""Finds NaN and infinity in the tensors of a checkpoint."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np

from checkpoints.errors import CheckpointError

# The bits of the exponent. They are all set in NaN and infinity, and in no other number.
_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
_SHOWN = 20


class NonFinite:
    """Counts NaN and infinity by tensor. It is thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, name: str, data: np.ndarray) -> None:
        """Count those in a part of a tensor."""
        exponent = _EXPONENTS.get(str(data.dtype))
        if exponent is None:  # integers
            return
        bits = np.ascontiguousarray(data).view(f"uint{8 * data.itemsize}")
        exponent = bits.dtype.type(exponent)
        found = int(np.count_nonzero((bits & exponent) == exponent))
        if found:
            with self._lock:
                self._counts[name] += found

    def check(self, place: str) -> None:
        """Check that there are none.

        Raises:
          CheckpointError: names the tensors, with the number of such elements in each.
        """
        if self._counts:
            shown = [f"{name:.200} ({count} of its elements)" for name, count in sorted(self._counts.items())]
            more = len(shown) - _SHOWN
            text = ", ".join(shown[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
            raise CheckpointError(f"{place}: NaN or infinity in {text}; a model with such weights generates nothing")
