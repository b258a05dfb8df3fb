"""Export a checkpoint as a Hugging Face folder of safetensors, bit for bit.

  diffumesh export --checkpoint=DIR --output=FOLDER
  diffumesh export --checkpoint=DIR --output=FOLDER --lora=ADAPTER        with a LoRA adapter merged

transformers loads the folder (for Dream, with the original code). Tensors are checked against their digests and written
a gigabyte at a time. On several hosts, the first one does the work.

No code is copied. If config.json refers to code ("auto_map", as in Dream's), copy the *.py files of the original folder
into the export, where trust_remote_code finds them.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from checkpoints import FolderOutput, Processes, export_checkpoint
from launch.folders.models import define_lora_flag, open_model, print_licence, read_lora
from launch.folders.outputs import define_output_flags, prepare_output
from launch.hosts.place import define_place_flags
from launch.process.startup import progress_bar, run_launcher, say
from runtime import InputError

# The flags that --help shows; --helpfull shows all.
FIRST_FLAGS = ("checkpoint", "output", "overwrite", "lora", "num_processes")


def define_flags(values: flags.FlagValues) -> None:
    """Define this command's flags."""
    flags.DEFINE_string("checkpoint", None, "Checkpoint to export: folder, URL or Hub name.", flag_values=values)
    define_lora_flag(values)
    define_output_flags(values)
    define_place_flags(values)


def main(values: flags.FlagValues) -> None:
    """Run ``diffumesh export``: write a checkpoint's tensors into a Hugging Face folder."""
    source, _ = open_model(values.checkpoint, "checkpoint", lora=read_lora(values))
    if "://" in (values.output or ""):
        raise InputError(f"--output={values.output}: export writes to a local folder only")
    output = prepare_output(values, Processes())
    assert isinstance(output, FolderOutput)
    print_licence(source)
    with progress_bar("exporting", of_bytes=True) as progress:
        export_checkpoint(source, output, progress=progress)
    if "auto_map" in source.config:
        say(
            "config.json refers to code (auto_map), which is not copied: for trust_remote_code, copy the *.py files of "
            f"the original folder into {output.place}"
        )
    print(output.place)


def run(argv: Sequence[str] | None = None) -> None:
    """Run ``diffumesh export`` from the command line."""
    run_launcher(main, define_flags, __doc__ or "", argv, FIRST_FLAGS)


if __name__ == "__main__":
    run()
