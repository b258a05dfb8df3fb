"""Export a checkpoint as a Hugging Face folder of safetensors, bit for bit.

  diffumesh export --checkpoint=DIR --output=FOLDER

transformers loads the folder (for Dream: the original code does). Tensors are verified against their digests on the
way and written a gigabyte at a time. Started on several hosts, the first does the work.

No code is copied. Where config.json names code of the model's own ("auto_map", as Dream's does), put the *.py files of
the original folder beside the export; trust_remote_code finds them there.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from checkpoints import FolderOutput, Processes, export_checkpoint
from launch.convert import define_output_flags, make_way, open_model, say_licence
from launch.hosts.place import define_place_flags
from launch.process.startup import progress_bar, run_launcher, say
from runtime import InputError


def define_flags(values: flags.FlagValues) -> None:
    """Define this launcher's flags."""
    flags.DEFINE_string("checkpoint", None, "Checkpoint to export.", flag_values=values)
    define_output_flags(values)
    define_place_flags(values)


def main(values: flags.FlagValues) -> None:
    """Run the launcher."""
    source, _ = open_model(values.checkpoint, "checkpoint")
    if "://" in (values.output or ""):
        raise InputError(f"--output={values.output}: a Hugging Face folder is written to a disk")
    output = make_way(values, Processes())
    assert isinstance(output, FolderOutput)
    say_licence(source)
    with progress_bar("exporting", of_bytes=True) as progress:
        export_checkpoint(source, output, progress=progress)
    if "auto_map" in source.config:
        say(
            "config.json names code of the model's own (auto_map), which is not copied: for trust_remote_code put the "
            f"*.py files of the original folder into {output.place}"
        )
    print(output.place)


def run(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
