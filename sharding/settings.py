"""JAX settings of the program around an engine, on which the engine does not depend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def own_settings() -> Iterator[None]:
    """Trace with JAX's default settings; also a decorator.

    A training program in the same process may have set a mesh (``jax.set_mesh``), on which an engine's programs could
    not be traced, another form of random bits, which would change the tokens of a seed, 64-bit types, or stricter rules
    for operands of different types.
    """
    with (
        jax.set_mesh(None),
        jax.threefry_partitionable(True),
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield
