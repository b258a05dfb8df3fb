"""Generation of a caller's batch: through the scheduler, or step by step if a caller observes or changes the rows.

Dimension letters: B batch, S the caller's prompt width, N new tokens, V vocab.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from runtime.decoding.block_schedule import block_schedule, canvas_length
from runtime.decoding.draft_counts import AUTO_DRAFTS
from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.execution.caller_rows import CallerRows
from runtime.execution.hooks import HookedSteps, LogitsHook, TokensHook
from runtime.execution.left_padding import Rows
from runtime.execution.offline import OfflineScheduler, Pace
from runtime.execution.pool_shape import rows_at_once, runner_for, steps_per_block, uses_cache
from runtime.execution.requests import StopTest
from runtime.execution.result import GenerationResult, GenerationStats, committed_tokens, masks_left
from runtime.execution.row_request import RowResult, block_span, final_tokens, most_steps_of_row
from runtime.execution.runner import Runner
from runtime.execution.slot_kinds import DiffusionSlots, longest_span, open_slots_for
from runtime.execution.specialization import with_own_drafts, without_drafts
from sharding.errors import InputError, NonFiniteError

# Seconds between two progress reports, after each of which the caller may end rows: many times less than a user waits
# after an interruption, and long enough that the pauses cost little.
SECONDS_PER_REPORT = 0.15
# Several hosts have to pause after the same steps, so their clocks do not matter. Approximate number of reports per
# generation, and the maximum number of steps between two reports.
_PROGRESS_REPORTS = 64
_MOST_STEPS_PER_REPORT = 16
_ALL_ITERATIONS = 1 << 30


@dataclass(frozen=True)
class Observers:
    """Callbacks that observe or change a generation between steps.

    Attributes:
      history: whether to return the canvas after each step (diffusion only).
      tokens_hook, logits_hook: see :mod:`runtime.execution.hooks` (diffusion, exact decoding only).
      watch: called with the number of steps done and the canvas int32 ``[B, S + N]``, before the first step and after
        each step.
      progress: called during the run with the number of steps done and the maximum number of steps.
      stop_tests: one per row, see :data:`runtime.execution.requests.StopTest`; empty for none. With ``watch``, all rows
        continue until every row has ended, and tokens after a row's end are not counted.
    """

    history: bool = False
    tokens_hook: TokensHook | None = None
    logits_hook: LogitsHook | None = None
    watch: Callable[[int, np.ndarray], None] | None = None
    progress: Callable[[int, int], None] | None = None
    stop_tests: Sequence[StopTest | None] = ()

    @property
    def hooked(self) -> bool:
        """Whether a hook may change the rows between steps."""
        return self.tokens_hook is not None or self.logits_hook is not None

    def check(self, config: DiffusionConfig | SamplingConfig) -> None:
        """Check that the callbacks work with a configuration.

        Raises:
          InputError: hooks or history are used with an autoregressive model, or hooks with anything but exact decoding,
            with guidance or with stop strings.
        """
        if isinstance(config, SamplingConfig) and (self.hooked or self.history):
            raise InputError("hooks and history require a diffusion model; this checkpoint is autoregressive")
        if isinstance(config, DiffusionConfig) and config.variable_length and self.hooked:
            raise InputError("hooks are not available for models whose canvas changes its length")
        if isinstance(config, DiffusionConfig) and (config.in_blocks or config.stop_token_ids) and self.hooked:
            raise InputError("hooks require exact decoding, without cache, block_length, parallel and stop tokens")
        if self.logits_hook is not None and isinstance(config, DiffusionConfig) and config.cfg_scale:
            raise InputError("logits_hook requires cfg_scale=0: it gets the logits of a pass without guidance")
        if self.hooked and any(self.stop_tests):
            raise InputError("hooks are not available with stop strings: all rows run all steps")
        if isinstance(config, DiffusionConfig) and config.draft_steps not in (0, AUTO_DRAFTS) and self.hooked:
            hook = "tokens_hook" if self.tokens_hook is not None else "logits_hook"
            raise InputError(
                f"draft_steps is {config.draft_steps}; {hook} requires draft_steps=0, because it may change the canvas "
                "between two steps",
                field="draft_steps",
            )


class WatchedBatch:
    """A batch whose rows are all in slots at the same time and pause together between steps.

    Attributes:
      steps: maximum number of steps of any row.
      rows: the caller's rows.
    """

    def __init__(
        self,
        runner: Runner,
        rows: CallerRows,
        config: DiffusionConfig | SamplingConfig,
        width: int,
        entries: bool = False,
    ) -> None:
        """Put the rows into slots.

        Args:
          runner: the model on its mesh.
          rows: the caller's rows, at most as many as fit into memory.
          config: decoding parameters of all rows.
          width: bucket of the canvases.
          entries: record a history of canvases of variable length, see :meth:`history`.

        Raises:
          InputError: there are more rows than fit into memory.
        """
        # Every step is shown, so a pass makes one step.
        config = without_drafts(config)
        count = len(rows.requests)
        size = runner.batch_size(count, width, uses_cache(config))
        if count > size:
            raise InputError(f"{count} rows do not fit into memory on this mesh (at most {size}). Pass fewer rows")
        self.rows, self.steps = rows, most_steps(runner, rows, config, width)
        steps, span = steps_per_block(config, width), longest_span(runner, rows.requests)
        self.slots = open_slots_for(runner, config, width, size, steps, span, entries)
        self.slots.insert(dict(enumerate(rows.requests)))
        # In exact decoding, a step means that all rows run the same denoise step. Otherwise, it is an iteration of the
        # loop, in which each row runs a denoise step of its own.
        self._denoise_steps = isinstance(config, DiffusionConfig) and not config.in_blocks
        # Without stop tokens, exact decoding never ends early: steps that commit nothing are counted too.
        self._may_end = bool(config.stop_token_ids) or (isinstance(config, DiffusionConfig) and config.variable_length)
        self._entries: list[np.ndarray] | None = [] if entries else None

    def advance_by(self, steps: int) -> Iterator[int]:
        """Run to the end, ``steps`` steps at a time, and yield the number of steps done so far after each run.

        Raises:
          NonFiniteError: the model's logits are not finite.
        """
        made = 0
        while made < self.steps:
            limit = min(made + steps, self.steps)
            if self._denoise_steps:
                done = self.slots.run(step_limit=limit).all() and self._may_end
            else:
                done = self.slots.run(max_iterations=limit - made).all()
            self._check()
            if self._entries is not None:
                assert isinstance(self.slots, DiffusionSlots)
                self._entries += list(self.slots.entries().transpose(1, 0, 2))
            made = self.steps if done else limit
            yield made

    def history(self) -> np.ndarray:
        """Return the canvases of variable length, suffixes included, after each change: int32 ``[entries, B, C]``.

        A step leaves one entry, one more if it deletes positions, and one more if it expands masks. Each row's own
        entries come first; -1 fills the others, and the positions beyond a row's length.
        """
        count = len(self.rows.requests)
        rows = [[one[row] for one in self._entries or () if (one[row] >= 0).any()] for row in range(count)]
        found = np.full((max(map(len, rows)), count, self.slots.width), -1, np.int32)
        for row, own in enumerate(rows):
            found[: len(own), row] = own
        return found

    def canvas(self) -> np.ndarray:
        """Return the current canvas in the caller's layout, int32 ``[B, S + N]``."""
        return self.rows.canvas(self.slots.canvas())

    def have_stopped(self, tests: Sequence[StopTest | None]) -> bool:
        """Return whether the stop tests have ended all rows; False if a row has none."""
        if not tests or not all(tests):
            return False
        stopped = True
        for canvas, request, test in zip(self.slots.canvas(), self.rows.requests, tests, strict=False):
            prompt, own = len(request.tokens), canvas[: request.length]
            certain = final_tokens(own, prompt).tolist() if (own[:prompt] >= 0).all() else []
            stopped &= test is not None and test(certain, False) is not None
        return stopped

    def results(self, stopped: bool = False) -> list[RowResult]:
        """Return the result of each row; with ``stopped``, rows that are not complete are ended as they are.

        Raises:
          NonFiniteError: the model's logits are not finite.
        """
        self._check()
        return self.slots.collect(dict(enumerate(enumerate(self.rows.requests))), ended_early=stopped)

    def _check(self) -> None:
        if (wrong := np.flatnonzero(self.slots.non_finite())).size:
            raise NonFiniteError(wrong.tolist())


def most_steps(runner: Runner, rows: CallerRows, config: DiffusionConfig | SamplingConfig, width: int) -> int:
    """Return the maximum number of steps of any row: denoise steps, or new tokens of an autoregressive model."""
    if isinstance(config, SamplingConfig):
        return config.max_new_tokens
    if config.variable_length:
        return max(most_steps_of_row(request, runner.layout.config) for request in rows.requests)
    if not config.in_blocks:
        return config.steps
    most = 1
    for request in rows.requests:
        length, steps = block_schedule(config, min(request.canvas_length, width))
        most = max(most, math.ceil(block_span(request, runner.layout.config) / length) * steps)
    return most


def generate_rows(
    runner: Runner, rows: Rows, config: DiffusionConfig | SamplingConfig, seeds: list[int], observers: Observers
) -> GenerationResult:
    """Generate a batch.

    Args:
      runner: the model on its mesh.
      rows: the prompts, start-aligned and as the caller gave them.
      config: decoding parameters of all rows.
      seeds: one seed per row.
      observers: callbacks between steps.

    Returns:
      Sequences ``[B, S + N]`` and statistics.

    Raises:
      InputError: with ``watch`` or hooks, there are more rows than fit into memory.
      NonFiniteError: the model's logits are not finite.
    """
    start, programs = time.perf_counter(), runner.programs
    config = with_own_drafts(config, runner.layout.spec.data, len(rows.lengths), runner.draft is not None)
    compiled, compile_seconds = programs.compiled, programs.seconds
    width = runner.bucket(canvas_length(int(rows.given.max()), config))
    own = CallerRows(rows, config, seeds, runner.layout.config, width)
    stats = GenerationStats(steps=most_steps(runner, own, config, width))
    history: np.ndarray | None = None
    entries = observers.history and isinstance(config, DiffusionConfig) and config.variable_length
    if observers.hooked or entries or observers.watch is not None:
        batch = WatchedBatch(runner, own, config, width, entries)
        if observers.hooked:
            assert isinstance(batch.slots, DiffusionSlots)
            steps = HookedSteps(runner, own, batch.slots, stats.steps)
            seen = partial(_show, batch, observers)
            history = steps.run(observers.tokens_hook, observers.logits_hook, observers.history, seen)
        stopped = not observers.hooked and _watch(batch, observers)
        history = batch.history() if entries else history
        results, stats.forwards, stats.batches = batch.results(stopped), batch.slots.forwards, 1
    else:
        results = _schedule(runner, own, config, width, stats, observers)
    if observers.history and history is None:
        history = own.history(results, stats.steps)
    sequences, commit_steps = own.sequences(results), own.commit_steps(results)
    real = rows.real_canvas(config.max_new_tokens)
    stats.positions = sum(one.positions for one in results)
    drafts = [one.drafts for one in results if one.drafts is not None]
    stats.row_passes, stats.accepted_steps = sum(one.passes for one in drafts), sum(one.accepted for one in drafts)
    stats.tokens = _counted(sequences, commit_steps, rows.original.shape[1], config, observers.stop_tests)
    stats.masks_left = int(masks_left(sequences, real, runner.layout.config.mask_token_id).sum())
    stats.compiled_programs = programs.compiled - compiled
    stats.compile_seconds = programs.seconds - compile_seconds
    stats.seconds = time.perf_counter() - start
    return GenerationResult(sequences, commit_steps, history, seeds, own.log_probabilities(results), stats, drafts)


def _counted(
    sequences: np.ndarray,
    commit_steps: np.ndarray,
    prompt: int,
    config: DiffusionConfig | SamplingConfig,
    stop_tests: Sequence[StopTest | None],
) -> int:
    """Count the tokens committed in all rows ``[B, S + N]`` up to the rows' ends; ``prompt`` is the prompt width S."""
    tests = stop_tests or [None] * len(sequences)
    return sum(
        committed_tokens(
            sequence, steps, prompt, config.stop_token_ids, test(sequence[prompt:].tolist(), True) if test else None
        )
        for sequence, steps, test in zip(sequences, commit_steps, tests, strict=True)
    )


def _watch(batch: WatchedBatch, observers: Observers) -> bool:
    """Run a batch step by step and call the observers; return whether stop tests ended all rows early."""
    _show(batch, observers, 0)
    for done in batch.advance_by(1):
        _show(batch, observers, done)
        if done < batch.steps and batch.have_stopped(observers.stop_tests):
            return True
    return False


def _show(batch: WatchedBatch, observers: Observers, done: int) -> None:
    """Tell the observers that ``done`` steps are done."""
    if observers.progress is not None:
        observers.progress(done, batch.steps)
    if observers.watch is not None:
        observers.watch(done, batch.canvas())


def _schedule(
    runner: Runner,
    rows: CallerRows,
    config: DiffusionConfig | SamplingConfig,
    width: int,
    stats: GenerationStats,
    observers: Observers,
) -> list[RowResult]:
    """Run all rows through the scheduler, as many at a time as memory allows, and fill in ``stats``."""
    count, progress, tests = len(rows.requests), observers.progress, observers.stop_tests
    slots = rows_at_once(runner_for(runner, config), config, width, count)
    scheduler = OfflineScheduler(runner, rows.requests, slots, width, tests)
    stats.batches = math.ceil(count / slots)
    total = stats.steps * stats.batches
    # If no row is inserted or moved later, one call of the program runs all rows to their end, unless a stop test or
    # progress reports need to see them earlier.
    iterations: int | Pace | None = _ALL_ITERATIONS if scheduler.fits_one_bucket and not any(tests) else None
    if progress is not None:
        reported = max(1, min(stats.steps // _PROGRESS_REPORTS, _MOST_STEPS_PER_REPORT))
        iterations = Pace(SECONDS_PER_REPORT) if jax.process_count() == 1 else reported
        progress(0, total)
    found: dict[int, Any] = {}
    for results in scheduler.run(iterations=iterations):
        if wrong := [one.number for one in results if one.non_finite]:
            raise NonFiniteError(sorted(wrong))
        found |= {one.number: one for one in results}
        if progress is not None:
            done = len(found) == count
            progress(total if done else min(total, scheduler.stats.slot_iterations // slots), total)
    stats.forwards = scheduler.stats.forwards
    return [found[number] for number in range(count)]
