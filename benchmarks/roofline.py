"""The measured roofline of a device: its peak rates, which are the denominators of MFU and MBU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from benchmarks.records import time_alternating
from runtime.planner import is_out_of_memory

# Calls queued before waiting, so that the host's overhead per call vanishes.
_QUEUED = 10
# Sizes that saturate a device: rows of a square product, and bytes of an array larger than any cache.
MATMUL_SIZE = {"cpu": 1024, "gpu": 8192, "tpu": 8192}
COPY_BYTES = {"cpu": 1 << 28, "gpu": 1 << 31, "tpu": 1 << 30}

Result = TypeVar("Result")


@dataclass(frozen=True)
class Roofline:
    """The roofline of one device: the peak rates of arithmetic and of memory.

    Attributes:
      flops: floating-point operations per second of a large square matrix product.
      bandwidth: bytes read and written per second by a copy.
    """

    flops: float
    bandwidth: float


def measure_roofline(device: Any, dtype: str, repeats: int, matmul_size: int, copy_bytes: int) -> Roofline:
    """Measure the peak rates of one device.

    Args:
      device: the device.
      dtype: dtype of the matrix product.
      repeats: number of timed calls.
      matmul_size: rows and columns of the product.
      copy_bytes: size of the array that is copied.
    """
    keys = jax.random.split(jax.random.key(0))
    with jax.default_device(device):
        # Random numbers: products of zeros can run faster than real ones.
        left, right = (jax.random.normal(key, (matmul_size, matmul_size), jnp.dtype(dtype)) for key in keys)
        source = jnp.zeros(copy_bytes // 4, jnp.float32)
        # As the models multiply: by default, GPUs and TPUs round the factors of float32 products.
        precision = jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None
        multiply = jax.jit(partial(jnp.matmul, precision=precision))
        # The copy is in place: new arrays would measure the speed of memory allocation.
        increment, held = jax.jit(lambda array: array + 1, donate_argnums=0), [source]

        def copy() -> jax.Array:
            held[0] = increment(held[0])
            return held[0]

        def queued(call: Callable[[], jax.Array]) -> Callable[[], jax.Array]:
            def run() -> jax.Array:
                for _ in range(_QUEUED - 1):
                    call()
                return call()

            return run

        calls = {"product": queued(lambda: multiply(left, right)), "copy": queued(copy)}
        # Use the fastest call, because a roofline is an upper bound.
        best = {name: timing.minimum / 1e3 / _QUEUED for name, timing in time_alternating(calls, repeats).items()}
    return Roofline(2.0 * matmul_size**3 / best["product"], 2.0 * copy_bytes / best["copy"])


def fits_or_none(measure: Callable[[], Result]) -> Result | str:
    """Call ``measure``. If the device's memory is too small, return the error message, so that the run continues."""
    try:
        return measure()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return str(error).split("\n")[0][:200]
