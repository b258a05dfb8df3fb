"""Flags of ``diffumesh batch``, and the function that reads its input with them."""

from __future__ import annotations

from pathlib import Path

from absl import flags

from launch.batches.folder import SAMPLES, own_file
from launch.batches.lines import Batch, read_batch
from launch.flags.decoding import decoding_config, define_request_flags
from launch.flags.requests import request_defaults
from launch.openai.bodies import Defaults
from launch.process.path_flags import define_path
from runtime import CheckpointFolder, InputError, ModelConfig

FORMATS = ("results", "evalplus")
_BAD_LINES_SHOWN = 20


def define_batch_flags(values: flags.FlagValues) -> None:
    """Define the flags for the input, the output and the requests of a batch."""
    define_path("input", "File of prompts, one JSON object per line.", values)
    define_path("output_dir", "Folder for the results; created if needed.", values)
    flags.DEFINE_enum("format", "results", FORMATS, f"evalplus: also write {SAMPLES} for EvalPlus.", flag_values=values)
    flags.DEFINE_bool("skip_bad", False, "Write invalid lines to errors.jsonl and run the others.", flag_values=values)
    flags.DEFINE_integer(
        "slots", None, "Maximum rows to run at once. Default: 32 per data shard.", 1, flag_values=values
    )
    flags.DEFINE_bool(
        "verbose", False, "Print all decoding parameters, the mesh and the size of the weights.", flag_values=values
    )
    define_request_flags(values)


def check_paths(values: flags.FlagValues) -> None:
    """Check that the input and the output folder are named.

    Raises:
      InputError: one of them is not named, the output is not a local folder, or a batch would write the input.
    """
    for name in ("input", "output_dir"):
        if not values[name].value:
            raise InputError(f"--{name} is missing; see --help")
    if "://" in values.output_dir:
        raise InputError(f"--output_dir={values.output_dir}: expected a local folder on host 0")
    if (own := own_file(Path(values.output_dir), Path(values.input))) is not None:
        raise InputError(
            f"--input={values.input}: this is {own} of --output_dir={values.output_dir}, which a batch writes; name "
            "another output folder"
        )


def read_input(values: flags.FlagValues, folder: CheckpointFolder, model: ModelConfig) -> tuple[Batch, Defaults]:
    """Read and check the lines of the input. Returns them, and the defaults that they were read with.

    Raises:
      InputError: a flag is invalid, or a line is invalid and ``--skip_bad`` is not set.
    """
    config = decoding_config(values, folder, model)
    if not isinstance(config.seed, int):
        raise InputError(f'--seed={values.seed}: batch takes a single seed; set "seed" on individual lines')
    defaults = request_defaults(
        values,
        folder,
        model,
        config,
        seed=config.seed,
        chat=values.chat,
        samples=values.num_return_sequences,
        stop=values.stop,
    )
    batch = read_batch(Path(values.input), defaults)
    if batch.bad and not values.skip_bad:
        shown = [f"{values.input}:{bad.number}: {bad.message}" for bad in batch.bad[:_BAD_LINES_SHOWN]]
        more = len(batch.bad) - len(shown)
        shown += [f"... and {more} more"] if more else []
        advice = "--skip_bad runs the others and writes an error record for each of these"
        raise InputError("\n".join([f"{len(batch.bad)} lines cannot be run ({advice}):", *shown]))
    return batch, defaults
