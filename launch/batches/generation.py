"""Generation of the missing results of a batch, each written when it is ready."""

from __future__ import annotations

from collections.abc import Sequence

from launch.batches.collector import paused_collector
from launch.batches.folder import BatchFolder
from launch.batches.lines import Line
from launch.batches.progress import ProgressReport
from launch.batches.records import Key
from launch.batches.rows import LineRows
from launch.openai.bodies import Defaults
from launch.process.startup import progress_bar, say, this_host
from runtime import Engine


def complete(
    engine: Engine,
    lines: Sequence[Line],
    done: set[Key],
    defaults: Defaults,
    output: BatchFolder | None,
    slots: int | None,
) -> tuple[int, dict[Key, str]]:
    """Generate the missing results, and write each when it is ready.

    Args:
      engine: the model on its mesh.
      lines: all lines of the input.
      done: keys of the results that exist.
      defaults: the defaults that the lines were read with.
      output: the output folder; None on hosts that do not write.
      slots: number of slots; None for the default of :meth:`Engine.scheduler`.

    Returns:
      The number of results written, and the keys of those that cannot be computed, each with the reason. Together they
      are all that were missing, unless the run was told to stop.
    """
    with paused_collector():
        rows = LineRows(lines, defaults)
        skip = rows.of_records(done)
        scheduler = engine.scheduler(rows.requests, slots, engine.stop_tests(rows.stops))
    total, count = len(rows.requests) - len(skip), 0
    report = ProgressReport(scheduler.stats, total)
    with progress_bar("rows") as progress:
        for results in scheduler.run(skip, more=lambda: not this_host().draining()):
            records, errors = rows.finish(results)
            if output is not None and errors:
                output.add_errors(errors)
            if output is not None and records:
                output.append(records)
            count += len(records)
            progress(scheduler.stats.rows, total)
            report.print_if_due()
    report.print()
    stats = scheduler.stats
    accepted = f", {stats.accepted_steps} steps accepted from drafts" if stats.accepted_steps else ""
    cached = f" ({read} of them read from the compile cache)" if (read := engine.runner.programs.cached) else ""
    say(
        f"{stats.forwards} forward passes, {stats.computed_positions} positions computed, "
        f"{100 * stats.useful_share:.1f}% of them useful, {engine.compiled_programs} programs compiled"
        f"{cached}{accepted}"
    )
    return count, rows.failed
