"""XLA flags for the CPU programs of tests: with little optimization, or XLA's defaults as for users."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from runtime.models.declarations import ModelLayout

# XLA's defaults of the options that QUICK_FLAGS changes. Tests that are about the generated code compile with these.
AS_RELEASED: dict[str, str | bool | int] = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_parallel_codegen_split_count": 32,
}
# A small program is compiled for seconds and runs for milliseconds. The passes over HLO, which decide on sharding,
# collectives and most of the fusions, stay; LLVM optimizes nothing, on one thread, and fusions are emitted by the older
# emitters.
_QUICK: dict[str, str | bool | int] = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}

# These passes over HLO make loops faster, but take much of the time to compile a small program. They are not in
# QUICK_FLAGS, because programs for TPU and GPU are compiled with those too.
_SLOW_PASSES = "while-loop-invariant-code-motion,simplify-while-loops"

# XLA of JAX 0.11 has no other emitters.
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    AS_RELEASED["xla_cpu_use_fusion_emitters"] = True
    _QUICK["xla_cpu_use_fusion_emitters"] = False

QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in _QUICK.items())


@contextmanager
def without_slow_passes() -> Iterator[None]:
    """Leave two passes over HLO out of the CPU programs of engines that are loaded in this context in this process.

    Where a model's compiler options name passes to leave out, only these are.
    """
    # Not at the top: it imports JAX, which reads QUICK_FLAGS when it is loaded.
    from runtime.execution import runner

    original = runner.compiler_options

    def options(layout: ModelLayout, dtype: Any) -> dict[str, str | bool | int]:
        assert layout.mesh is not None
        on_cpu = layout.mesh.devices.flat[0].platform == "cpu"
        return ({"xla_disable_hlo_passes": _SLOW_PASSES} if on_cpu else {}) | (original(layout, dtype) or {})

    with mock.patch.object(runner, "compiler_options", options):
        yield


@contextmanager
def optimized() -> Iterator[None]:
    """Optimize the programs of engines that are loaded in this context, here and in child processes.

    For tests that run a few small programs for many steps, which then take less time than the optimization.
    """
    # Not at the top: it imports JAX, which reads QUICK_FLAGS when it is loaded.
    import jax

    from runtime.execution import runner

    jax.devices()  # XLA reads its flags with its first client; here, so that the level stays out of later programs
    level, original = {"xla_backend_optimization_level": 1}, runner.compiler_options

    def options(layout: ModelLayout, dtype: Any) -> dict[str, str | bool | int]:
        return (original(layout, dtype) or {}) | level

    text = " ".join(f"--{name}={value}" for name, value in level.items())
    flags = f"{os.environ.get('XLA_FLAGS', '')} {text}"
    with mock.patch.object(runner, "compiler_options", options), mock.patch.dict(os.environ, XLA_FLAGS=flags):
        yield
