"""Tests run on simulated CPU devices; TPU programs are compiled ahead of time, without a TPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

# libtpu reads these when it is loaded: describe a slice instead of looking for one.
os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-8",
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    HF_HUB_OFFLINE="1",
)

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_num_cpu_devices", 16)


@pytest.fixture(autouse=True)
def _no_compilation_cache_left_behind() -> Iterator[None]:
    """A launcher that a test runs in this process may set a folder for compiled programs, for all that come after."""
    yield
    if jax.config.jax_compilation_cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
