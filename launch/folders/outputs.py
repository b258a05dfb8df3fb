"""The folder that a command writes, prepared on all hosts."""

from __future__ import annotations

from absl import flags

from checkpoints import Output, Processes, output_at
from launch.process.startup import say, this_host
from runtime import InputError


def define_output_flags(values: flags.FlagValues) -> None:
    """Define the flags of a command that writes a checkpoint."""
    flags.DEFINE_string("output", None, "Folder to write; convert also writes to gs://.", flag_values=values)
    flags.DEFINE_bool(
        "overwrite", False, "Replace the output if it is a checkpoint and contains no other files.", flag_values=values
    )


def prepare_output(values: flags.FlagValues, everyone: Processes) -> Output:
    """Prepare the folder that ``--output`` names for writing by all processes.

    Raises:
      InputError: the flag is missing, or the output exists and may not be replaced.
    """
    if not values.output:
        raise InputError("--output is missing: name the folder to write")
    output = output_at(values.output)

    def prepare() -> str:
        for line in output.prepare(values.overwrite) if everyone.is_first else ():
            say(line)
        return ""

    everyone.agree(prepare)
    return output


def all_hosts() -> Processes:
    """Return the hosts of this run, as the processes that share a conversion."""
    host = this_host()
    return Processes(
        host.process_index, host.count, lambda text: [str(said) for said in host.gather("conversion", text)]
    )
