"""Complete a file of prompts, each exactly once, through interruptions and restarts.

  diffumesh batch --input=prompts.jsonl --output_dir=DIR                 the demo checkpoint, on this machine's devices
  diffumesh batch --input=... --output_dir=DIR --checkpoint=apple/DiffuCoder-7B-cpGRPO --mesh=tensor=8 --chat
  diffumesh batch --input=HumanEval.jsonl --output_dir=DIR --format=evalplus ...    samples.jsonl for EvalPlus

A line is {"id": "1", "prompt": "def f("}, with its own decoding parameters as further fields, or an OpenAI batch
request {"custom_id": "1", "body": {"messages": [...], "max_tokens": 256}}. DIR/results.jsonl receives one line per
result, when it is ready; DIR/sorted.jsonl has all results in the order of the input, at the end.

To continue after an interruption, run the same command again: results on disk are not computed again, and the output
equals that of an uninterrupted run. DIR/run.json records the checkpoint, tokenizer, input, parameters, seed and code; a
different run is refused. With several hosts, every host reads the input, and host 0 writes the output.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from absl import flags

from launch.batches.folder import RESULTS, SORTED, BatchFolder
from launch.batches.lines import Batch, Line, read_batch
from launch.batches.records import Key, error_record, evalplus_records, keys
from launch.batches.rows import LineRows
from launch.flags.decoding import decoding_config, define_decoding_flags, describe, steps_follow_tokens
from launch.flags.model import default_name, define_model_flags, load_engine, open_checkpoint, read_tokenizer
from launch.hosts.faults import EXIT_RESTART
from launch.hosts.preflight import code_digest
from launch.openai.bodies import Defaults
from launch.process.profiling import check_profiling, define_profiling_flags, traced, write_programs
from launch.process.startup import (
    define_device_flags,
    is_main_process,
    progress_bar,
    run_launcher,
    say,
    start_devices,
    this_host,
    version,
)
from runtime import (
    MAX_SAMPLES,
    CheckpointFolder,
    Engine,
    InputError,
    ModelConfig,
    SchedulerStats,
    end_tokens,
    folder_fingerprint,
)

FORMATS = ("results", "evalplus")
SAMPLES = "samples.jsonl"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja")
_BAD_LINES_SHOWN = 20
SECONDS_BETWEEN_REPORTS = 10.0


def define_flags(values: flags.FlagValues) -> None:
    """Define the flags of this command."""

    flags.DEFINE_string("input", None, "File of prompts, one JSON object per line.", flag_values=values)
    flags.DEFINE_string("output_dir", None, "Folder for the results; created if needed.", flag_values=values)
    flags.DEFINE_enum("format", "results", FORMATS, f"evalplus: also write {SAMPLES} for EvalPlus.", flag_values=values)
    flags.DEFINE_bool("skip_bad", False, "Write invalid lines to errors.jsonl and run the others.", flag_values=values)
    flags.DEFINE_integer(
        "slots", None, "Rows on the devices at a time. Default: 32 per data shard.", 1, flag_values=values
    )
    define_model_flags(values)
    flags.DEFINE_bool(
        "chat", False, "Put each prompt into the checkpoint's chat template as a user's message.", flag_values=values
    )
    define_decoding_flags(values)
    flags.DEFINE_integer("num_return_sequences", 1, "Completions of each prompt.", 1, MAX_SAMPLES, flag_values=values)
    flags.DEFINE_multi_string("stop", [], "String that ends a completion; repeatable.", flag_values=values)
    define_device_flags(values)
    define_profiling_flags(values)


def read_input(values: flags.FlagValues, folder: CheckpointFolder, model: ModelConfig) -> tuple[Batch, Defaults]:
    """Read and check the lines of the input; returns them with the defaults they were read with.

    Raises:
      InputError: a flag is invalid, or a line is and ``--skip_bad`` is not set.
    """
    tokenizer = read_tokenizer(folder)
    end_token_ids = end_tokens(model, folder, tokenizer)
    config = decoding_config(values, folder, model)
    if not isinstance(config.seed, int):
        raise InputError(f"--seed={values.seed}: a batch has one seed; give other seeds as fields of lines")
    defaults = Defaults(
        model_name=default_name(folder),
        model=model,
        tokenizer=tokenizer,
        config=config,
        steps_follow_tokens=steps_follow_tokens(values, folder),
        end_token_ids=end_token_ids,
        seed=config.seed,
        chat=values.chat,
        samples=values.num_return_sequences,
        stop=tuple(values.stop),
    )
    batch = read_batch(Path(values.input), defaults)
    if batch.bad and not values.skip_bad:
        shown = [f"{values.input}:{bad.number}: {bad.message}" for bad in batch.bad[:_BAD_LINES_SHOWN]]
        more = len(batch.bad) - len(shown)
        shown += [f"... and {more} more"] if more else []
        advice = "--skip_bad runs the others and writes an error record for each of these"
        raise InputError("\n".join([f"{len(batch.bad)} of the lines cannot be run ({advice}):", *shown]))
    return batch, defaults


def run_facts(
    values: flags.FlagValues, folder: CheckpointFolder, checkpoint: str, batch: Batch, defaults: Defaults
) -> dict[str, Any]:
    """The facts that determine the results and identify a run. The mesh is not among them."""
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        if (folder.path / name).is_file():
            digest.update(name.encode() + b"\0" + hashlib.sha256((folder.path / name).read_bytes()).digest())
    decoding = dataclasses.asdict(defaults.config)
    del decoding["seed"]
    facts = {
        "version": version(),
        "code": code_digest(),
        "checkpoint": checkpoint,
        "tokenizer": digest.hexdigest()[:16],
        "input": batch.digest,
        "seed": defaults.seed,
        "decoding": decoding,
        "chat": defaults.chat,
        "num_return_sequences": defaults.samples,
        "stop": list(defaults.stop),
        "dtype": values.dtype,
        "quantize": values.quantize,
        "kv_cache": values.kv_cache,
    }
    return dict(json.loads(json.dumps(facts)))


def main(values: flags.FlagValues) -> None:
    """Run the command."""
    for name in ("input", "output_dir"):
        if not values[name].value:
            raise InputError(f"--{name} is missing; see --help")
    if "://" in values.output_dir:
        raise InputError(f"--output_dir={values.output_dir}: expected a folder on a disk of host 0")
    check_profiling(values)
    folder, model = open_checkpoint(values)
    batch, defaults = read_input(values, folder, model)
    if batch.ignored:
        say(f"ignored fields, which are no decoding parameters: {', '.join(batch.ignored):.500}")
    checkpoint = folder_fingerprint(folder)
    facts = run_facts(values, folder, checkpoint, batch, defaults)
    order = [key for line in batch.lines for key in keys(line)]
    # Only host 0 has the output folder; all hosts compute the same rows.
    with _held(values.output_dir) if is_main_process() else _nothing() as output:
        done: set[Key] = set()
        if output is not None:
            output.check(facts)
            for sentence in output.repaired:
                say(sentence)
            done = output.done(set(order))
        start_devices(values, {"checkpoint": checkpoint, "input": batch.digest})
        done = {(key[0], key[1]) for key in this_host().gather("done", sorted(done, key=str))[0]}
        if output is not None and done:
            say(f"{len(done)} of {len(order)} results exist already")
        if len(done) < len(order):
            engine = load_engine(values, folder, len(order), values.slots)
            facts |= {"weights": str(engine.dtype)}
            if output is not None:
                output.check(facts)
            say(describe(defaults.config))
        if output is not None:
            output.begin(facts)
            output.add_errors([error_record(bad) for bad in batch.bad])
        if len(done) < len(order):
            with traced(values):
                made = complete(engine, batch.lines, done, defaults, output, values.slots)
            if values.dump_hlo is not None:
                write_programs(values, engine.program_texts())
            missing = len(order) - len(done) - made
            if missing:
                say(f"{missing} of {len(order)} results are missing; run the same command again to continue")
                this_host().finish()
                sys.exit(EXIT_RESTART)
        if output is not None:
            _publish(output, order, batch, values)


@contextmanager
def _held(path: str) -> Iterator[BatchFolder | None]:
    folder = BatchFolder(Path(path))
    try:
        yield folder
    finally:
        folder.close()


@contextmanager
def _nothing() -> Iterator[BatchFolder | None]:
    yield None


def complete(
    engine: Engine,
    lines: Sequence[Line],
    done: set[Key],
    defaults: Defaults,
    output: BatchFolder | None,
    slots: int | None,
) -> int:
    """Generate the missing results, and write each when it is ready.

    Args:
      engine: the model on its mesh.
      lines: all lines of the input.
      done: keys of the results that exist.
      defaults: the defaults that the lines were read with.
      output: the output folder; None on hosts that do not write.
      slots: see :meth:`Engine.scheduler`.

    Returns:
      The number of results written: all that were missing, unless the run was told to stop.
    """
    rows = LineRows(lines, defaults)
    skip = rows.of_records(done)
    scheduler = engine.scheduler(rows.requests, slots, engine.stop_tests(rows.stops))
    total, count = len(rows.requests) - len(skip), 0
    report = _Report(scheduler.stats, total)
    with progress_bar("rows") as progress:
        for results in scheduler.run(skip, more=lambda: not this_host().draining()):
            records = [record for result in results if (record := rows.record(result)) is not None]
            if output is not None and records:
                output.append(records)
            count += len(records)
            progress(scheduler.stats.rows, total)
            report.at_times()
    report.now()
    stats = scheduler.stats
    say(
        f"{stats.forwards} forward passes, {stats.computed_positions} positions computed, "
        f"{100 * stats.useful_share:.1f}% of them useful, {engine.compiled_programs} programs compiled"
    )
    return count


class _Report:
    """Prints the progress of the batch on standard error."""

    def __init__(self, stats: SchedulerStats, rows: int) -> None:
        self._stats, self._rows = stats, rows
        self._start = self._last = time.monotonic()

    def at_times(self) -> None:
        """Print the progress if the last line was printed some time ago."""
        if time.monotonic() - self._last >= SECONDS_BETWEEN_REPORTS:
            self.now()

    def now(self) -> None:
        """Print the progress."""
        self._last = time.monotonic()
        stats, seconds = self._stats, max(self._last - self._start, 1e-9)
        left = self._rows - stats.rows
        remaining = ""
        if left and stats.rows:
            minutes, rest = divmod(round(seconds / stats.rows * left), 60)
            remaining = f", about {minutes // 60}:{minutes % 60:02}:{rest:02} left"
        say(
            f"{stats.rows}/{self._rows} rows, {stats.rows / seconds:.2f} rows/s, "
            f"{stats.tokens / seconds:.1f} tokens/s, slots {100 * stats.utilisation:.0f}% busy{remaining}"
        )


def _publish(output: BatchFolder, order: Sequence[Key], batch: Batch, values: flags.FlagValues) -> None:
    """Write the sorted results, and the samples for EvalPlus, once every result exists."""
    found = output.sort(order)
    if values.format == "evalplus":
        output.write(SAMPLES, [sample for record in found for sample in evalplus_records(record, values.chat)])
    say(
        f"{len(found)} results in {output.path / RESULTS}, in the input's order in {output.path / SORTED}"
        + (f"; {len(batch.bad)} lines in errors.jsonl" if batch.bad else "")
    )


def run(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
