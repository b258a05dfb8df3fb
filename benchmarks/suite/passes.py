"""Single forward passes and denoise steps: time, efficiency over batches, MFU, and compilation of new lengths.

Dimension letters: B batch, S canvas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.models import forward_flops
from benchmarks.records import NotRunError, Timing
from benchmarks.suite.sheet import Measurement
from benchmarks.suite.subject import Subject, prompt_ids, request_of
from benchmarks.timed_passes import Request, TimedPass, timed_requests
from runtime import Engine
from runtime.execution.programs import ProgramCache, compiler_options, lower_hidden, put
from runtime.execution.result import GenerationResult, GenerationStats
from runtime.execution.runner import canvas_bucket
from runtime.models.attention import choose_attention
from runtime.models.families import Weights
from runtime.models.forward import Forward
from runtime.models.kv_cache import cache_bytes_per_device
from runtime.models.transformer import hidden_states, project_logits
from runtime.planner.default import topology_of
from runtime.planner.estimate import Estimate
from runtime.planner.workload import Workload
from sharding.errors import InputError
from sharding.topology import CHIPS

FORWARD, GRID, LENGTHS = "forward", "forward over lengths and batches", "sequence lengths"
STEP, BLOCK_STEP = "denoise step", "block step"
# Entry of the acceptance list
BATCHING = "batching speeds up forward passes of every length"
_STEPS = 8
# Rows, canvas and block length of block steps with a dual cache
BLOCK_BATCHES = (1, 16)
_BLOCK_CANVAS, _BLOCK = 256, 32


def masked_positions(result: GenerationResult) -> float:
    """Return the number of masks in all rows during a forward pass, averaged over the passes."""
    steps = np.unique(result.commit_steps[result.commit_steps >= 0])
    return float(np.mean([(result.commit_steps >= step).sum() for step in steps]))


def _programs(engine: Engine) -> ProgramCache:
    """Create a program cache with the compiler options of the engine."""
    return ProgramCache(compiler_options(engine.layout, engine.dtype))


def _arguments(subject: Subject, batch: int, canvas: int) -> tuple[Forward, tuple[Any, ...]]:
    engine, layout = subject.engine, subject.engine.layout
    attention = choose_attention(subject.values.attention, engine.platform, layout, canvas, engine.dtype)
    return Forward(layout, attention), (
        engine.weights,
        put(prompt_ids(engine.config, batch, canvas), layout.sharding("batch", None)),
        put(np.full(batch, canvas, np.int32), layout.sharding("batch")),
    )


def measure_ten_tokens(subject: Subject) -> None:
    """Measure one pass over 10 tokens, with the logits of all of them."""
    engine, canvas = subject.engine, 10

    def prepare() -> Callable[[], Any]:
        subject.check_shape(1, canvas)
        if canvas % engine.layout.spec.sequence:
            raise NotRunError(f"10 positions do not divide over sequence={engine.layout.spec.sequence}")
        forward, arguments = _arguments(subject, 1, canvas)

        def logits(weights: Weights, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
            return project_logits(forward, weights, hidden_states(forward, weights, tokens, lengths))

        program = _programs(engine).get((), lambda: jax.jit(logits).lower(*arguments))
        return lambda: program(*arguments)

    def facts(timing: Timing) -> Mapping[str, Any]:
        return {"tokens_per_second": round(canvas / (timing.mean / 1e3), 1)}

    subject.sheet.measure(FORWARD, "10 tokens, with logits", prepare, facts, seconds=subject.expected_seconds(1, 10))


def grid_name(canvas: int, batch: int) -> str:
    """Return the name of a measurement of the grid."""
    return f"{canvas} tokens, batch {batch}"


def measure_grid(subject: Subject, lengths: list[int], batches: list[int]) -> None:
    """Measure the transformer without its head over lengths and batches. Efficiency is relative to batch 1."""
    for canvas in lengths:
        for batch in batches:

            def prepare(batch: int = batch, canvas: int = canvas) -> Callable[[], Any]:
                subject.check_shape(batch, canvas)
                forward, arguments = _arguments(subject, batch, canvas)
                program = _programs(subject.engine).get((), lambda: lower_hidden(forward, *arguments))
                return lambda: program(*arguments)

            def facts(timing: Timing, batch: int = batch, canvas: int = canvas) -> Mapping[str, Any]:
                flops = forward_flops(subject.engine.config, batch, canvas, 0)
                found = {
                    "tokens_per_second": round(batch * canvas / (timing.mean / 1e3), 1),
                    "mfu": subject.mfu(flops, timing.median),
                }
                alone = subject.sheet.find(grid_name(canvas, 1))
                if batch == 1:
                    found["efficiency"] = 1.0
                elif alone is not None and alone.mean is not None:
                    found["efficiency"] = round(alone.mean * batch / timing.mean, 3)
                return found

            seconds = subject.expected_seconds(batch, canvas)
            subject.sheet.measure(GRID, grid_name(canvas, batch), prepare, facts, seconds=seconds)


def best_of_grid(rows: Sequence[Measurement]) -> dict[int, tuple[float, int]]:
    """Return for each length of the grid the highest tokens per second relative to batch 1, and its batch (above 1)."""
    best: dict[int, tuple[float, int]] = {}
    for row in rows:
        if row.section != GRID or row.not_run is not None or "efficiency" not in row.facts:
            continue
        canvas, batch = (int(one) for one in re.findall(r"\d+", row.name))
        if batch > 1:
            best[canvas] = max(best.get(canvas, (0.0, 0)), (row.facts["efficiency"], batch))
    return dict(sorted(best.items()))


def judge_batching(rows: Sequence[Measurement]) -> tuple[bool, str]:
    """Return whether batches speed up the passes of every length of the grid, and the figures as text.

    Raises:
      NotRunError: no length was run with a batch of 1 and a larger one.
    """
    best = best_of_grid(rows)
    if not best:
        raise NotRunError(f"{GRID}: no length was run with a batch of 1 and a larger one")
    # A ratio that is shown as 1.00 is no speed-up.
    faster = sum(round(times, 2) > 1.0 for times, _ in best.values())
    each = "; ".join(f"{length} tokens: {times:.2f} at batch {batch}" for length, (times, batch) in best.items())
    return faster == len(best), f"{faster} of {len(best)} lengths; tokens per second relative to batch 1: {each}"


def read_shapes(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Parse rows and positions, such as ``8x1024``.

    Raises:
      InputError: the text has another form.
    """
    found = [re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,6})", text) for text in texts]
    if not all(found):
        raise InputError(f"--steps={','.join(texts)}: expected rows and positions such as 8x1024, separated by commas")
    return [(int(one[1]), int(one[2])) for one in found if one]


def _workload(subject: Subject, batch: int, canvas: int) -> Workload:
    """Return the planner's workload for denoise steps on a half-masked canvas."""
    half = canvas // 2
    return Workload(subject.engine.config, str(subject.engine.dtype), batch, canvas - half, half, _STEPS)


def measure_steps(subject: Subject, shapes: Sequence[tuple[int, int]]) -> None:
    """Measure a denoise step: a generation with the published settings divided by its passes."""
    config = subject.engine.config
    for batch, canvas in shapes:
        name = f"batch {batch}, canvas {canvas}"
        if config.objective == "autoregressive":
            subject.sheet.leave_out(STEP, name, "the model is autoregressive")
            continue

        def prepare(batch: int = batch, canvas: int = canvas) -> tuple[Workload, Mapping[str, Request]]:
            workload = _workload(subject, batch, canvas)
            return workload, timed_requests(workload, STEP)

        def facts(_: Workload, timed: TimedPass, batch: int = batch, canvas: int = canvas) -> Mapping[str, Any]:
            each = timed.timing.median
            flops = forward_flops(config, batch, canvas, masked_positions(timed.result))
            return {
                "canvas_tokens_per_second": round(batch * canvas / (each / 1e3), 1),
                "mfu": subject.mfu(flops, each),
            } | _predicted(subject, batch, canvas)

        seconds = subject.expected_seconds(batch, canvas, _STEPS)
        subject.measure_pass(STEP, name, subject.engine, prepare, facts, seconds=seconds)


def masked_in_blocks(result: GenerationResult, prompt: int, length: int) -> float:
    """Return the number of masks in all rows' blocks during a block step, averaged over the steps.

    The first pass of each block is a refresh and does not count.
    """
    counts = []
    for start in range(prompt, result.commit_steps.shape[1], length):
        block = result.commit_steps[:, start : start + length]
        counts += [(block >= step).sum() for step in np.unique(block)[1:]]
    return float(np.mean(counts))


def measure_block_steps(subject: Subject) -> None:
    """Measure a block step with a dual cache: only the window is computed, with cached keys and values of the rest."""
    engine = subject.engine
    config, platform = engine.config, engine.platform
    for batch in BLOCK_BATCHES:
        name = f"batch {batch}, canvas {_BLOCK_CANVAS}, blocks of {_BLOCK}"
        if config.objective == "autoregressive":
            subject.sheet.leave_out(BLOCK_STEP, name, "the model is autoregressive")
            continue

        def prepare(batch: int = batch) -> tuple[Workload, Mapping[str, Request]]:
            canvas, new, steps = _BLOCK_CANVAS, 2 * _BLOCK, 2 * _STEPS
            dtype = str(engine.dtype)
            workload = Workload(config, dtype, batch, canvas - new, new, steps, cache="dual", block_length=_BLOCK)
            return workload, timed_requests(workload, BLOCK_STEP)

        def facts(workload: Workload, timed: TimedPass) -> Mapping[str, Any]:
            each = timed.timing.median
            phase = next(one for one in workload.phases(engine.layout, platform) if one.name == BLOCK_STEP)
            masked = masked_in_blocks(timed.result, workload.prompt, _BLOCK)
            flops = forward_flops(config, workload.batch, phase.positions, masked, phase.keys)
            read = subject.weight_bytes + cache_bytes_per_device(
                engine.layout, workload.batch, phase.keys, engine.dtype
            )
            return {
                "window": phase.positions,
                "mfu": subject.mfu(flops, each),
                "mbu": subject.mbu(read, each),
            }

        # Two refreshes and the steps, and then the refreshes alone.
        seconds = subject.expected_seconds(batch, _BLOCK_CANVAS, 4) + subject.expected_seconds(
            batch, _BLOCK, 2 * _STEPS
        )
        subject.measure_pass(BLOCK_STEP, name, engine, prepare, facts, seconds=seconds)


def _predicted(subject: Subject, batch: int, canvas: int) -> dict[str, float]:
    """Return the planner's estimate of a denoise step on this machine; empty if the planner does not know the chip."""
    topology = topology_of(subject.devices)
    if topology.chip.name not in CHIPS:
        return {}
    (phase,) = Estimate(_workload(subject, batch, canvas), topology, subject.engine.layout).phases
    return {"predicted_ms": round(1e3 * phase.seconds, 3)}


def measure_lengths(subject: Subject, lengths: list[int], new_tokens: int = 16, steps: int = 4) -> None:
    """Measure first calls: a length of a compiled bucket, a length of a new bucket, and each of ``lengths``.

    The calls for ``lengths`` return log-probabilities, as no other measurement does, so that their programs are new.
    """
    engine, sheet = subject.engine, subject.sheet
    request = request_of(engine.config, new_tokens, steps)
    own = request.replace(log_probabilities=True)

    def bucket(length: int) -> int:
        return canvas_bucket(length, engine.layout, engine.platform)

    known = bucket(150)
    new = bucket(known + 1)

    def call(canvas: int, config: Request) -> GenerationStats:
        subject.check_shape(1, canvas)
        if canvas <= new_tokens:
            raise NotRunError(f"there is no prompt beside {new_tokens} new tokens")
        return engine.generate_tokens(prompt_ids(engine.config, 1, canvas - new_tokens), config=config).stats

    for name, canvas, config in (
        ("another length of a known bucket", known, request),
        ("a length of a new bucket", new, request),
        *((f"first run, {length} tokens", length, own) for length in lengths),
    ):

        def work(name: str = name, canvas: int = canvas, config: Request = config) -> None:
            if canvas == known and config is request:
                call(known - 3, config)
            stats = call(canvas, config)
            facts = {
                "positions": canvas,
                "programs_compiled": stats.compiled_programs,
                "compile_seconds": round(stats.compile_seconds, 3),
            }
            sheet.value(LENGTHS, name, 1e3 * stats.seconds, "ms", facts)

        sheet.attempt(LENGTHS, name, work)
