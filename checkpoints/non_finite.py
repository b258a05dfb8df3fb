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
    """Counts NaN, infinities and all values by tensor. It is thread-safe."""

    def __init__(self) -> None:
        self._nans: Counter[str] = Counter()
        self._infinities: Counter[str] = Counter()
        self._values: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, name: str, data: np.ndarray) -> None:
        """Count NaN, infinities and all values in a part of a tensor. A tensor of integers is not counted."""
        exponent = _EXPONENTS.get(str(data.dtype))
        if exponent is None:  # integers
            return
        bits = np.ascontiguousarray(data).view(f"uint{8 * data.itemsize}")
        exponent = bits.dtype.type(exponent)
        found = int(np.count_nonzero((bits & exponent) == exponent))
        nans = int(np.count_nonzero(np.isnan(data))) if found else 0
        with self._lock:
            self._values[name] += data.size
            self._nans[name] += nans
            self._infinities[name] += found - nans

    def check(self, place: str) -> None:
        """Check that no NaN or infinity was counted.

        Raises:
          CheckpointError: names the tensors, with the numbers of such values in each.
        """
        wrong = sorted((self._nans + self._infinities).keys())  # the sum of two Counters leaves out zeros
        if wrong:
            shown = [f"{name:.200} ({self._count(name)})" for name in wrong]
            more = len(shown) - _SHOWN
            text = ", ".join(shown[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
            raise CheckpointError(f"{place}: NaN or infinity in {text}; a model with such weights cannot generate")

    def _count(self, name: str) -> str:
        counts = ((self._nans[name], "NaN"), (self._infinities[name], "infinite"))
        found = " and ".join(f"{count:,} {kind}" for count, kind in counts if count)
        return f"{found} of {self._values[name]:,} values"
