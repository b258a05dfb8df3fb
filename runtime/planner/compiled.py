"""Ahead-of-time compilation of a workload's programs for a topology, to check an estimate with the compiler.

The programs are the same as those that a generation runs. No device needs to be attached.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from runtime.decoding.schedule import padded_steps
from runtime.execution.programs import (
    abstract_decode,
    abstract_denoise,
    compiler_options,
    lower_decode,
    lower_denoise,
    lower_prefill,
)
from runtime.execution.specialization import decode_program, denoise_program
from runtime.models.attention import choose_attention
from runtime.models.declarations import ModelLayout
from runtime.models.forward import Forward
from runtime.planner.estimate import PhaseEstimate
from runtime.planner.hlo import HloCollective, bytes_by_axis, count_by_kind, read_collectives
from runtime.planner.workload import Phase, Workload
from sharding.errors import MeshError, OutOfMemoryError
from sharding.mesh import MeshSpec

# The cuDNN version that compilation assumes, 9.10: its attention supports the GPUs that programs are compiled for.
_CUDNN_VERSION = 91000


@dataclass(frozen=True)
class CompiledPhase:
    """Memory, collectives and compile time of one compiled program, as the compiler reports them.

    Attributes:
      name: name of the :class:`~runtime.planner.workload.Phase`, or ``blocks`` for the program that runs both refreshes
        and block steps.
      attention: the attention implementation that the program uses.
      argument_bytes, temporary_bytes, output_bytes, aliased_bytes: memory on one device.
      collectives: the collectives in the optimized HLO.
      seconds: compile time.
      text: the optimized HLO.
    """

    name: str
    attention: str
    argument_bytes: int
    temporary_bytes: int
    output_bytes: int
    aliased_bytes: int
    collectives: tuple[HloCollective, ...]
    seconds: float
    text: str

    @property
    def memory_bytes(self) -> int:
        """Memory on one device in bytes: arguments, temporaries, and outputs that do not reuse an argument's memory."""
        return self.argument_bytes + self.temporary_bytes + self.output_bytes - self.aliased_bytes

    @property
    def passes(self) -> tuple[str, ...]:
        """Names of the phases that the program runs."""
        return ("refresh", "block step") if self.name == "blocks" else (self.name,)

    def bytes_by_axis(self, layout: ModelLayout, phase: Phase) -> dict[tuple[str, tuple[str, ...]], float]:
        """Return the bytes that one pass moves, by kind of collective and mesh axes.

        Args:
          layout: the layout that the program is compiled for.
          phase: one of the program's phases.
        """
        found, lengths = self._collectives_in_pass(phase)
        return bytes_by_axis(found, layout.mesh_axis_sizes, lengths)

    def count_by_kind(self, phase: Phase) -> dict[str, float]:
        """Return how many collectives of each kind one pass runs, counting those of every layer."""
        return count_by_kind(*self._collectives_in_pass(phase))

    def _collectives_in_pass(self, phase: Phase) -> tuple[list[HloCollective], list[float]]:
        """Return the collectives of a pass, and how often one pass runs those that are inside 0, 1, 2, ... open loops.

        An open loop is one whose trip count is known only at run time.
        """
        # Code outside all open loops only prepares. The outer open loop is over passes, the inner one over head chunks.
        lengths = [1.0] if phase.name == "prefill" else [0.0, 1.0, phase.chunks]
        if phase.canvases:
            # Inside the loop over passes, there is one over the steps that a pass makes: here a single one.
            lengths = [0.0, 1.0, 1.0, phase.chunks]
        if self.name != "blocks":
            return list(self.collectives), lengths
        # In the loop over steps, refreshes and block steps each have a loop of their own. That of block steps runs the
        # following ones too, so that the code around it is left out: it runs only when rows move or need a refresh.
        # Inside that of refreshes, a third loop runs the head for each row that shares the refresh: a single row,
        # unless several rows have the same prompt.
        refresh = phase.name == "refresh"
        found = [one for one in self.collectives if ("/refresh/" in one.scope) == refresh]
        return found, [0.0, 0.0, 1.0, 1.0, phase.chunks] if refresh else [0.0, 0.0, 1.0, phase.chunks]


def compile_workload(workload: Workload, spec: MeshSpec, devices: Sequence[Any]) -> list[CompiledPhase]:
    """Compile the programs of a workload's phases.

    Args:
      workload: the workload.
      spec: the mesh.
      devices: attached devices or those of an AOT topology, at least as many as the mesh has.

    Raises:
      OutOfMemoryError: a device has too little memory for a program.
      MeshError: compilation fails for another reason. Either message contains the compiler's error.
    """
    config, platform = workload.config, devices[0].platform
    layout = workload.layout(spec, devices)
    rows, canvas = workload.rows(spec.data), workload.canvas(layout, platform)
    attention = choose_attention("auto", platform, layout, canvas, jnp.dtype(workload.dtype))
    blocks = workload.block_length if workload.cache == "exact" else 0
    forward, weights = (
        Forward(layout, attention).with_blocks(blocks),
        layout.abstract_weights(jnp.dtype(workload.dtype)),
    )
    dtype, vocab = jnp.dtype(workload.dtype), config.vocab_size
    if config.objective == "autoregressive":
        decoding = decode_program(workload.sampling(), vocab)
        arguments = abstract_decode(layout, rows, canvas, dtype)
        width = workload.phases(layout, platform)[0].positions
        lowerings = {
            "prefill": lambda: lower_prefill(forward, decoding, width, weights, *arguments),
            "decode": lambda: lower_decode(forward, decoding, weights, *arguments),
        }
    else:
        cached = workload.cache != "none"
        program = denoise_program(
            workload.decoding(),
            config,
            workload.dtype,
            chunk=workload.chunk(layout, platform),
            width=canvas,
            span=workload.span(layout, platform),
        )
        steps = padded_steps(workload.steps, canvas)
        kept, drafts = dtype if cached else None, program.drafts
        denoise_arguments = abstract_denoise(layout, rows, canvas, steps, kept, drafts=drafts)
        name = "blocks" if cached else "denoise step"
        lowerings = {name: lambda: lower_denoise(forward, program, weights, *denoise_arguments)}
    options = compiler_options(layout, dtype)
    return [_compile(name, attention, options, lower) for name, lower in lowerings.items()]


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error of a compiler or a device says that its memory is too small.

    JAX's exceptions carry no status code, so this function reads the message: XLA's messages begin with the status, and
    some compilers state the cause only in words.
    """
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()


def _compile(name: str, attention: str, options: Any, lower: Any) -> CompiledPhase:
    start = time.perf_counter()
    try:
        with _assumed_cudnn() if attention == "cudnn" else contextlib.nullcontext():
            compiled: jax.stages.Compiled = lower().compile(compiler_options=options)
    except Exception as error:  # each compiler raises its own exception types
        kind = OutOfMemoryError if is_out_of_memory(error) else MeshError
        raise kind(f"compiling the {name} program failed: {str(error)[:2000]}") from error
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    assert memory is not None
    return CompiledPhase(
        name=name,
        attention=attention,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        collectives=tuple(read_collectives(text)),
        seconds=time.perf_counter() - start,
        text=text,
    )


@contextlib.contextmanager
def _assumed_cudnn() -> Iterator[None]:
    """Assume a cuDNN version, so that cuDNN attention can be lowered on a machine without cuDNN.

    Lowering asks cuDNN only for its version. JAX has no public way to state the version that a program is compiled for.
    """
    from jax._src.cudnn import fused_attention_stablehlo as attention

    before = attention.check_cudnn_version
    attention.check_cudnn_version = lambda: _CUDNN_VERSION
    try:
        yield
    finally:
        attention.check_cudnn_version = before


def collectives_agree(found: PhaseEstimate, compiled: CompiledPhase, layout: ModelLayout) -> bool:
    """Return whether estimate and compiler agree on the bytes of each kind of collective over each set of mesh axes."""
    sizes = layout.mesh_axis_sizes
    estimated: dict[tuple[str, tuple[str, ...]], float] = {}
    for one in found.collectives:
        key = one.kind, tuple(axis for axis in one.axes if sizes[axis] > 1)
        estimated[key] = estimated.get(key, 0.0) + one.payload * one.times
    read = compiled.bytes_by_axis(layout, found.phase)
    return estimated.keys() == read.keys() and all(
        abs(estimated[key] - read[key]) <= 1e-9 * max(1.0, read[key]) for key in read
    )
