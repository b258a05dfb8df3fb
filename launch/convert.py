"""Convert a Hugging Face folder into a canonical checkpoint: Orbax, for any mesh, with a manifest of digests.

  diffumesh convert --source=FOLDER --output=DIR                 as stored
  diffumesh convert --source=FOLDER --output=DIR --dtype=bfloat16
  diffumesh convert --source=FOLDER --output=DIR --quantize=int8
  diffumesh convert --source=FOLDER --output=DIR --lora=ADAPTER       with a LoRA adapter merged, before quantization
  diffumesh convert --source=params.pkl --config=FOLDER/config.json --output=DIR --biases_from=FOLDER

Orbax writes the tensors in groups of 512 MB. Peak host memory is about four times a group, or four times the largest
tensor if that is larger: 4.5 GB was measured for a checkpoint of 15.2 GB whose largest tensor has 1.1 GB.
Several processes each read and write a share; they need an output that all of them see. The result is bit-identical
for any number of processes. --output=gs://bucket/folder writes to an object store, which cannot rename: there the
manifest, written last, completes the checkpoint, and --overwrite first removes the manifest of the old one. The result
includes configuration, tokenizer and generation config, so nothing else is needed to run it. An interrupted conversion
leaves nothing that could be taken for a checkpoint; the next run says so and cleans up. CPU devices are used.

A legacy params.pkl is indexed, not unpickled: nothing in it is executed. It has no q, k and v biases, so
--biases_from or --zero_biases is required.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from absl import flags

from checkpoints import convert, find_legacy, folder_fingerprint, open_folder
from launch.folders.models import define_lora_flag, layout_of, open_model, print_licence, read_lora
from launch.folders.outputs import all_hosts, define_output_flags, prepare_output
from launch.folders.pickles import define_pickle_flags
from launch.process.startup import define_device_flags, progress_bar, run_launcher, say, start_devices
from runtime import QUANTIZATIONS, STORED_DTYPES, InputError

# The flags that --help shows; --helpfull shows all.
FIRST_FLAGS = (
    "source", "output", "overwrite", "dtype", "quantize", "lora", "revision", "offline", "config", "biases_from",
    "zero_biases", "devices", "num_processes",
)  # fmt: skip


def define_flags(values: flags.FlagValues) -> None:
    """Define this command's flags."""
    flags.DEFINE_string(
        "source", None, "Hugging Face folder, URL or Hub name; or a legacy params.pkl.", flag_values=values
    )
    define_pickle_flags(values)
    define_lora_flag(values)
    define_output_flags(values)
    flags.DEFINE_enum(
        "dtype", None, STORED_DTYPES, "Dtype to store the weights in. Default: that of the source.", flag_values=values
    )
    flags.DEFINE_enum(
        "quantize",
        "none",
        QUANTIZATIONS,
        "int8: store matrices as 8-bit integers with a scale per output channel; int4: as 4-bit integers with a scale "
        "per group of weights, two integers per byte. Neither can be undone.",
        flag_values=values,
    )
    flags.DEFINE_string("revision", None, "Branch, tag or commit on the Hub.", flag_values=values)
    flags.DEFINE_bool("offline", False, "Use only folders here and the Hub's local cache.", flag_values=values)
    define_device_flags(values)


def use_cpu_devices(values: flags.FlagValues) -> None:
    """Make JAX use CPU devices: a conversion does not need accelerators.

    Two devices are used, unless ``--devices`` or JAX's configuration says how many: Orbax stores an array in the chunks
    of its digests only if it is sharded.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    if values.devices is None and jax.config.values["jax_num_cpu_devices"] < 1:
        with suppress(RuntimeError):  # this process has used its devices already
            jax.config.update("jax_num_cpu_devices", 2)


def main(values: flags.FlagValues) -> None:
    """Run ``diffumesh convert``: write a Hugging Face folder or a legacy pickle as a canonical checkpoint."""
    legacy = find_legacy(
        values.source,
        config=values.config,
        biases_from=values.biases_from,
        zero_biases=values.zero_biases,
        offline=values.offline,
    )
    lora = read_lora(values)
    if legacy is not None and values.revision is not None:
        raise InputError(f"--revision={values.revision} needs a Hub name as --source; {values.source} is a file")
    if legacy is None:
        source, layout = open_model(
            values.source, "source", revision=values.revision, offline=values.offline, lora=lora
        )
        inputs = {"source": folder_fingerprint(source)}
    else:
        source = open_folder(legacy.folder, offline=values.offline, lora=lora)
        layout, inputs = layout_of(source), legacy.fingerprints
        if source.lora is not None:
            inputs = inputs | {"lora": folder_fingerprint(source.lora)}
    use_cpu_devices(values)
    start_devices(values, inputs)
    everyone = all_hosts()
    start = time.perf_counter()
    with ExitStack() as stack:
        tensors = None if legacy is None else legacy.open(layout, stack)
        if values.zero_biases:
            say("warning: the q, k and v biases are set to zero; the model will not compute what it was trained to")
        output = prepare_output(values, everyone)
        print_licence(source)
        with progress_bar("converting", of_bytes=True) as progress:
            convert(
                source,
                layout,
                output,
                tensors=tensors,
                dtype=values.dtype,
                quantize=values.quantize,
                progress=progress,
                processes=everyone,
                others=() if legacy is None else legacy.inputs,
            )
    say(f"{layout.parameter_count:,} parameters in {time.perf_counter() - start:.1f} s")
    if everyone.is_first:
        print(output.place)


def run(argv: Sequence[str] | None = None) -> None:
    """Run ``diffumesh convert`` from the command line."""
    run_launcher(main, define_flags, __doc__ or "", argv, FIRST_FLAGS)


if __name__ == "__main__":
    run()
