"""The time of one forward pass, from whole generations that alternate.

Dimension letters: B batch, P prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.records import NotRunError, Timing, time_alternating
from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.engine import Engine
from runtime.execution.result import GenerationResult
from runtime.planner.workload import Workload

Request = DiffusionConfig | SamplingConfig


@dataclass(frozen=True)
class TimedPass:
    """The measured time of one kind of forward pass.

    Attributes:
      timing: wall times of one pass; processor time is not measured, so ``cpu`` is 0.
      passes: number of passes of this kind in the generation.
      result: the result of the generation.
    """

    timing: Timing
    passes: int
    result: GenerationResult


def timed_requests(workload: Workload, what: str) -> Mapping[str, Request]:
    """Return the requests for :func:`time_pass`, by name.

    ``whole`` is the workload's generation. If it has passes of other kinds than ``what``, ``others`` has only those.
    """
    if workload.config.objective == "autoregressive":
        sampling = workload.sampling()
        return {"whole": sampling} | ({"others": sampling.replace(max_new_tokens=1)} if what == "decode" else {})
    decoding = workload.decoding()
    if what == "denoise step":
        return {"whole": decoding}
    # With one step per block, every step is a refresh.
    return {"whole": decoding, "others": decoding.replace(steps=math.ceil(workload.new_tokens / workload.block_length))}


def time_pass(
    engine: Engine, ids: np.ndarray, requests: Mapping[str, Request], repeats: int, warmup: int = 2
) -> TimedPass:
    """Time one pass: a generation's time, without that of passes of other kinds, divided by the number of passes.

    Args:
      engine: the model.
      ids: prompts ``[B, P]``.
      requests: the result of :func:`timed_requests`.
      repeats: timed calls of each request.
      warmup: number of calls before the timed ones.

    Raises:
      NotRunError: the other passes took longer than the whole generation, because the machine is busy.
    """
    found: dict[str, GenerationResult] = {}

    def generate(name: str, request: Request) -> Callable[[], None]:
        def call() -> None:
            found[name] = engine.generate_tokens(ids, config=request)

        return call

    calls = {name: generate(name, request) for name, request in requests.items()}
    timings = time_alternating(calls, repeats, warmup)
    whole = timings["whole"]
    less, passes = [0.0] * repeats, found["whole"].stats.forwards
    if "others" in timings:
        less, passes = list(timings["others"].each), passes - found["others"].stats.forwards
    each = [(one - other) / passes for one, other in zip(whole.each, less, strict=True)]
    if min(each) <= 0:
        raise NotRunError(f"the machine is too busy to time it: {list(whole.each)} ms in total, {less} ms without it")
    return TimedPass(Timing.of([one / 1e3 for one in each], [0.0]), passes, found["whole"])
