"""Compiled programs: how many there are, and how many came from JAX's persistent cache."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from runtime.execution.programs import ProgramCache


def test_programs_from_the_persistent_cache_are_counted(tmp_path: Path) -> None:
    settings = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in settings}
    compilation_cache.reset_cache()
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        counts = []
        for _ in range(2):
            programs = ProgramCache()
            for key, size in (("one", 3), ("two", 4), ("one", 3)):
                programs.get(key, lambda size=size: jax.jit(lambda x: x @ x.T).lower(jnp.ones((size, 2))))
            counts.append((programs.compiled, programs.cached))
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert counts == [(2, 0), (2, 2)]
