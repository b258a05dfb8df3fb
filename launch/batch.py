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

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

from absl import flags

from launch.batches.facts import run_facts
from launch.batches.folder import ERRORS, BatchFolder
from launch.batches.generation import complete
from launch.batches.publication import publish
from launch.batches.records import Key, as_bits, error_record, keys, of_bits
from launch.flags.batch import check_paths, define_batch_flags, read_input
from launch.flags.decoding import define_decoding_flags, describe, notices
from launch.flags.model import (
    define_model_flags,
    fingerprints,
    load_engine,
    open_checkpoint,
    open_draft_checkpoint,
    read_mesh,
)
from launch.hosts.faults import EXIT_RESTART, EXIT_USER_ERROR
from launch.process.profiling import check_profiling, define_profiling_flags, traced, write_programs
from launch.process.startup import (
    define_device_flags,
    is_main_process,
    run_launcher,
    say,
    start_devices,
    this_host,
)

# The flags that --help shows; --helpfull shows all.
FIRST_FLAGS = (
    "input", "output_dir", "format", "chat", "checkpoint", "mesh", "devices", "max_new_tokens", "temperature", "seed",
    "cache", "parallel", "quantize",
)  # fmt: skip


def define_flags(values: flags.FlagValues) -> None:
    """Define the flags of this command."""
    define_batch_flags(values)
    define_model_flags(values)
    define_decoding_flags(values)
    define_device_flags(values)
    define_profiling_flags(values)


def main(values: flags.FlagValues) -> None:
    """Run ``diffumesh batch``: complete the lines of the input that have no result yet."""
    check_paths(values)
    check_profiling(values)
    mesh = read_mesh(values)
    folder, model = open_checkpoint(values)
    draft = open_draft_checkpoint(values, folder)
    batch, defaults = read_input(values, folder, model)
    if batch.ignored:
        say(f"ignored fields that are not decoding parameters: {', '.join(batch.ignored):.500}")
    checkpoints = fingerprints(folder, draft)
    facts = run_facts(values, folder, checkpoints["checkpoint"], batch, defaults)
    order = [key for line in batch.lines for key in keys(line)]

    with _output_folder(values) as output:
        # Results that exist already must be those of a run with the same facts.
        done: set[Key] = set()
        if output is not None:
            output.check(facts)
            for sentence in output.repaired:
                say(sentence)
            done = output.done(set(order))
        start_devices(values, checkpoints | {"input": batch.digest, "tokens": facts["tokens"]})
        done = of_bits(this_host().gather("done", as_bits(done, order))[0], order)
        if done:
            say(f"{len(done)} of {len(order)} results exist already")

        # The dtype of the weights is one more fact, but it is known only when they are loaded.
        engine, failed = None, dict[Key, str]()
        if len(done) < len(order):
            engine = load_engine(values, folder, mesh, sum(line.samples for line in batch.lines), values.slots, draft)
            facts |= {"weights": str(engine.dtype)}
            if output is not None:
                output.check(facts)
            if values.verbose:
                say(describe(defaults.config))
            own = (line.config for line in batch.lines)
            family = defaults.model.family
            for sentence in notices(values, folder, family, [defaults.config], draft=draft, requests=own):
                say(sentence)
        if output is not None:
            output.begin(facts)
            output.add_errors([error_record(bad) for bad in batch.bad])

        if engine is not None:
            with traced(values):
                made, failed = complete(engine, batch.lines, done, defaults, output, values.slots)
            if values.dump_hlo is not None:
                write_programs(values, engine.program_texts())
            if missing := len(order) - len(done) - made - len(failed):
                say(f"{missing} of {len(order)} results are missing; run the same command again to continue")
                this_host().finish()
                sys.exit(EXIT_RESTART)
        publish(output, [key for key in order if key not in failed], batch, values.format == "evalplus")
        if failed:
            reasons = "; ".join(sorted(set(failed.values())))
            say(f"error: {len(failed)} of {len(order)} results could not be computed: {reasons}; see {ERRORS}")
            this_host().finish()
            sys.exit(EXIT_USER_ERROR)


def _output_folder(values: flags.FlagValues) -> AbstractContextManager[BatchFolder | None]:
    """Open the output folder on host 0, None elsewhere. All hosts compute the same rows, and host 0 writes them."""
    return closing(BatchFolder(Path(values.output_dir))) if is_main_process() else nullcontext()


def run(argv: Sequence[str] | None = None) -> None:
    """Run ``diffumesh batch`` from the command line."""
    run_launcher(main, define_flags, __doc__ or "", argv, FIRST_FLAGS)


if __name__ == "__main__":
    run()
