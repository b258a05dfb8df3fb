"""Whole generations: tokens per second of single rows and batches, diffusion and autoregressive, and on the CPU.

Dimension letters: B batch, P prompt.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from benchmarks.models import causal_twin
from benchmarks.records import NotRunError, Timing, time_alternating
from benchmarks.roofline import COPY_BYTES, MATMUL_SIZE, measure_roofline
from benchmarks.suite.subject import Subject, open_engine, rates, request_of
from benchmarks.timed_passes import Request, TimedPass
from launch.process.profiling import given_profiling, profile_again
from runtime.decoding.parameters import SamplingConfig
from runtime.engine import Engine
from runtime.models.families import model_layout
from runtime.models.kv_cache import cache_bytes_per_device
from runtime.models.placement import place_weights
from runtime.planner.workload import Workload

GENERATION, BATCHES, AUTOREGRESSIVE, CPU = "generation", "batches", "autoregressive", "CPU"
PROMPT = 14
# Name, rows, new tokens, steps
GENERATIONS = (
    ("50 tokens, 25 steps", 1, 50, 25),
    ("100 tokens, 50 steps, 4 prompts", 4, 100, 50),
    ("256 tokens, 256 steps", 1, 256, 256),
)
BATCH_REQUEST = (50, 25)
DECODED = 64
DECODE_BATCHES = (1, 8, 64)


def measure_generations(subject: Subject) -> None:
    """Measure typical generations, and trace the first one if requested."""
    engine = subject.engine
    for number, (name, batch, new, steps) in enumerate(GENERATIONS):
        found: dict[str, Any] = {}
        prepare = subject.generation(engine, batch, PROMPT, request_of(engine.config, new, steps), found)
        passes = new if engine.config.objective == "autoregressive" else steps
        seconds = subject.expected_seconds(batch, PROMPT + new, passes)

        def facts(timing: Timing, found: dict[str, Any] = found) -> Mapping[str, Any]:
            return rates(found["result"], timing.mean)

        subject.sheet.measure(GENERATION, name, prepare, facts, seconds=seconds)
        if number == 0 and found:
            _profile(subject, name, prepare)


def _profile(subject: Subject, name: str, prepare: Callable[[], Callable[[], None]]) -> None:
    """Write a trace and the programs of a call if the flags are set. If that fails, add the reason to the sheet."""
    if given_profiling(subject.values):
        texts = subject.engine.program_texts
        subject.sheet.attempt(
            GENERATION, f"{name}, profiled", lambda: profile_again(subject.values, name, prepare(), texts)
        )


def measure_batches(subject: Subject, batches: list[int]) -> None:
    """Measure a generation with increasing numbers of rows, and find the batch with the most tokens per second."""
    engine, sheet = subject.engine, subject.sheet
    new, steps = BATCH_REQUEST
    best: tuple[float, int] | None = None
    for batch in batches:
        found: dict[str, Any] = {}
        prepare = subject.generation(engine, batch, PROMPT, request_of(engine.config, new, steps), found)
        seconds = subject.expected_seconds(
            batch, PROMPT + new, new if engine.config.objective == "autoregressive" else steps
        )

        def facts(timing: Timing, found: dict[str, Any] = found) -> Mapping[str, Any]:
            return rates(found["result"], timing.mean)

        name = f"batch {batch}, {new} tokens, {steps} steps"
        sheet.measure(BATCHES, name, prepare, facts, seconds=seconds)
        row = sheet.find(name)
        if row is not None:
            best = max(best or (0.0, 0), (row.facts["tokens_per_second"], batch))
    if best is None:
        sheet.leave_out(BATCHES, "best batch", "no batch was run")
        return
    alone = sheet.find(f"batch 1, {new} tokens, {steps} steps")
    facts_: dict[str, Any] = {"batch": best[1]}
    if alone is not None:
        facts_["times_batch_1"] = round(best[0] / alone.facts["tokens_per_second"], 3)
    sheet.value(BATCHES, "best batch", best[0], "tokens/s", facts_)


def causal_engine(engine: Engine) -> Engine:
    """Return the engine, or for a diffusion model, an autoregressive engine with its weights."""
    if engine.config.objective == "autoregressive":
        return engine
    config = causal_twin(engine.config)
    mesh = engine.layout.mesh
    assert mesh is not None, "an engine has a mesh"
    layout = model_layout(config, engine.layout.spec, list(mesh.devices.flat))
    return Engine(layout, place_weights(layout, engine.weights, engine.dtype))


def measure_autoregressive(subject: Subject) -> None:
    """Measure generations with and without the cache, and one decode step with it."""
    sheet = subject.sheet
    causal = sheet.tried(lambda: causal_engine(subject.engine))
    if isinstance(causal, str):
        sheet.leave_out(AUTOREGRESSIVE, "every row", causal)
        return
    engine = causal
    same = {} if engine is subject.engine else {"weights": "the diffusion model's"}

    def facts_of(found: dict[str, Any], more: Mapping[str, Any]) -> Any:
        return lambda timing: rates(found["result"], timing.mean) | dict(more) | same

    for cached in (True, False):
        for batch in DECODE_BATCHES:
            found: dict[str, Any] = {}
            request = SamplingConfig(max_new_tokens=DECODED, use_cache=cached)
            prepare = subject.generation(engine, batch, PROMPT, request, found)
            canvas = 1 if cached else PROMPT + DECODED
            name = f"{DECODED} tokens, batch {batch}, {'cached' if cached else 'not cached'}"
            seconds = subject.expected_seconds(batch, canvas, DECODED)
            sheet.measure(AUTOREGRESSIVE, name, prepare, facts_of(found, {}), seconds=seconds)
    for batch in DECODE_BATCHES:
        name = f"decode step, batch {batch}"

        def prepare_step(batch: int = batch) -> tuple[Workload, Mapping[str, Request]]:
            whole, others = (SamplingConfig(max_new_tokens=new) for new in (DECODED, 1))
            workload = Workload(engine.config, str(engine.dtype), batch, PROMPT, DECODED)
            return workload, {"whole": whole, "others": others}

        def step_facts(workload: Workload, timed: TimedPass) -> Mapping[str, Any]:
            length = workload.canvas(engine.layout, engine.platform)
            read = subject.weight_bytes + cache_bytes_per_device(engine.layout, workload.batch, length, engine.dtype)
            return {
                "tokens_per_second": round(workload.batch / (timed.timing.mean / 1e3), 2),
                "mbu": subject.mbu(read, timed.timing.median),
            } | same

        seconds = subject.expected_seconds(batch, 1, DECODED + 1)
        subject.measure_pass(AUTOREGRESSIVE, name, engine, prepare_step, step_facts, seconds=seconds)


def measure_cpu(subject: Subject) -> None:
    """Measure a forward pass of the shortest generation on the CPU, and compare it with the accelerator's."""
    name, batch, new, _ = GENERATIONS[0]
    sheet, values = subject.sheet, subject.values
    title = "a pass of " + name
    if subject.engine.platform == "cpu":
        sheet.leave_out(CPU, title, "the suite runs on the CPU itself")
        return

    def work() -> None:
        there = sheet.find(name)
        if there is None:
            raise NotRunError(f"{name} was not run")
        device = jax.devices("cpu")[0]
        config = subject.engine.config
        # Few passes, because a large model is slow.
        passes = 2
        short = request_of(config, passes if config.objective == "autoregressive" else new, passes)
        engine = open_engine(values, [device], "data=1")
        roofline = measure_roofline(device, str(engine.dtype), 3, MATMUL_SIZE["cpu"], COPY_BYTES["cpu"])
        other = replace(subject, engine=engine, roofline=roofline)
        found: dict[str, Any] = {}
        call = other.generation(engine, batch, PROMPT, short, found)()
        timing = time_alternating({title: call}, 2, 1)[title]
        forwards = found["result"].stats.forwards
        here = timing.mean / forwards
        each = there.mean / there.facts["forwards"] if there.mean else 0.0
        facts = {
            "accelerator_ms": round(each, 3),
            "times_as_fast": round(here / each, 2),
            "dtype": str(engine.dtype),
            "tflops_per_second_of_the_cpu": round(roofline.flops / 1e12, 3),
        }
        sheet.value(CPU, title, here, "ms", facts)

    sheet.attempt(CPU, title, work)
    gc.collect()
