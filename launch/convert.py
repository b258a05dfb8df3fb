"""Convert a Hugging Face folder into a canonical checkpoint: Orbax, unpadded, mesh-free, with a manifest of digests.

  diffumesh convert --source=FOLDER --output=DIR                 as stored
  diffumesh convert --source=FOLDER --output=DIR --dtype=bfloat16
  diffumesh convert --source=FOLDER --output=DIR --quantize=int8
  diffumesh convert --source=params.pkl --config=FOLDER/config.json --output=DIR --biases_from=FOLDER

Tensors stream through a few blocks at a time: peak host memory is a small multiple of the largest tensor, never the
model. Started in several processes, each reads and writes its share; they need an output that all of them see, and the
result is the same to the bit. --output=gs://bucket/folder writes to an object store, where nothing can be renamed: the
manifest, written last, makes it a checkpoint, and --overwrite first removes the manifest of what is replaced. The
result carries configuration, tokenizer and generation config, so that it alone is enough to run. Interrupted at any
point it leaves nothing that could be taken for a checkpoint; the next run says so and cleans up.

A legacy params.pkl is indexed, not unpickled: nothing in it is executed. It lacks the q, k and v biases, so where they
come from must be said.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from absl import flags

from checkpoints import (
    CheckpointFolder,
    Output,
    Processes,
    convert,
    file_fingerprint,
    folder_fingerprint,
    open_folder,
    open_legacy,
    output_at,
)
from launch.process.startup import define_device_flags, progress_bar, run_launcher, say, start_devices, this_host
from runtime import QUANTIZATIONS, STORED_DTYPES, InputError, ModelLayout, model_layout, parse_config


def define_flags(values: flags.FlagValues) -> None:
    """Define this launcher's flags."""
    flags.DEFINE_string(
        "source", None, "Hugging Face folder, URL or Hub name; or a legacy params.pkl.", flag_values=values
    )
    flags.DEFINE_string(
        "config",
        None,
        "For a params.pkl: its model's config.json or folder; files beside it go along.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "biases_from", None, "For a params.pkl: model folder to take the q, k and v biases from.", flag_values=values
    )
    flags.DEFINE_bool("zero_biases", False, "For a params.pkl: accept that the biases are lost.", flag_values=values)
    define_output_flags(values)
    flags.DEFINE_enum("dtype", None, STORED_DTYPES, "Change the dtype; default keeps it.", flag_values=values)
    flags.DEFINE_enum(
        "quantize",
        "none",
        QUANTIZATIONS,
        "int8: store matrices as integers with a scale for each output channel; not to be undone.",
        flag_values=values,
    )
    flags.DEFINE_string("revision", None, "Branch, tag or commit on the Hub.", flag_values=values)
    flags.DEFINE_bool("offline", False, "Use only what the Hub's local cache holds.", flag_values=values)
    define_device_flags(values)


def define_output_flags(values: flags.FlagValues) -> None:
    """Flags of a launcher that writes a checkpoint."""
    flags.DEFINE_string("output", None, "Folder to write; a conversion may name a gs:// one.", flag_values=values)
    flags.DEFINE_bool("overwrite", False, "Replace the output if it exists.", flag_values=values)


def open_model(path: str | None, flag: str, **options: object) -> tuple[CheckpointFolder, ModelLayout]:
    """The folder that a flag names, and its model's layout without a mesh.

    Raises:
      InputError: the flag is missing, or the folder is not a model's.
    """
    if not path:
        raise InputError(f"--{flag} is missing: name the folder of a model")
    folder = open_folder(path, **options)  # type: ignore[arg-type]
    return folder, model_layout(parse_config(folder.config), quantization=folder.quantization)


def config_folder(path: str) -> str:
    """The folder that ``--config`` names, by itself or by the config.json in it.

    Raises:
      InputError: there is no such folder or file, or the file is called something else.
    """
    try:
        found = Path(path).expanduser()
        if found.is_dir():
            return str(found)
        if found.name == "config.json" and found.is_file():
            return str(found.parent)
    except (OSError, RuntimeError) as error:  # a name that no file can have, or a user that there is not
        raise InputError(f"--config={path}: {error}") from error
    raise InputError(f"--config={path}: no such folder or config.json; the file must have that name")


def pickle_path(path: str) -> Path | None:
    """The legacy pickle that a flag names, None where it names something else.

    Raises:
      InputError: there is no such file.
    """
    if not path.endswith((".pkl", ".pickle")):
        return None
    try:
        found = Path(path).expanduser()
        if found.is_file():
            return found
    except (OSError, RuntimeError) as error:
        raise InputError(f"{path}: {error}") from error
    raise InputError(f"{path}: no such file")


def make_way(values: flags.FlagValues, everyone: Processes) -> Output:
    """The output, ready to be written by all processes.

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
    """The hosts of this run, as those that convert together."""
    host = this_host()
    return Processes(
        host.process_index, host.count, lambda text: [str(said) for said in host.gather("conversion", text)]
    )


def say_licence(folder: CheckpointFolder) -> None:
    """Print the notice of the weights' licence, where the folder carries one."""
    for name in folder.side_files():
        if name.startswith("LICENSE"):
            lines = [line.strip() for line in folder.read_bytes(name).decode("utf-8", "replace").splitlines()]
            first = next((line for line in lines if line), "")
            say(f"the weights' licence, {name}: {first[:200]}")


def use_cpu_devices(values: flags.FlagValues) -> None:
    """Have JAX use CPU devices, unless ``--devices`` says how many: a conversion leaves accelerators to other programs.

    There are two, because Orbax stores an array in the chunks of its digests only if it is sharded.
    """
    import jax

    if values.devices is None:
        jax.config.update("jax_platforms", "cpu")
        with suppress(RuntimeError):  # in a process that has used its devices already
            jax.config.update("jax_num_cpu_devices", 2)


def main(values: flags.FlagValues) -> None:
    """Run the launcher."""
    legacy = pickle_path(values.source or "")
    donor = None
    if legacy is None:
        if values.config or values.biases_from or values.zero_biases:
            raise InputError("--config, --biases_from and --zero_biases go with a params.pkl as --source")
        source, layout = open_model(values.source, "source", revision=values.revision, offline=values.offline)
        inputs = {"source": folder_fingerprint(source)}
    else:
        if values.biases_from and values.zero_biases:
            raise InputError("--biases_from and --zero_biases exclude one another")
        source, layout = open_model(values.config and config_folder(values.config), "config")
        inputs = {"config": folder_fingerprint(source), "source": file_fingerprint(legacy)}
        if values.biases_from:
            donor = open_folder(values.biases_from)
            inputs["biases"] = folder_fingerprint(donor)
    use_cpu_devices(values)
    start_devices(values, inputs)
    everyone = all_hosts()
    start = time.perf_counter()
    with ExitStack() as stack:
        tensors = None
        if legacy is not None:
            tensors = open_legacy(legacy, layout, stack, biases_from=donor, zero_biases=values.zero_biases)
        if values.zero_biases:
            say("warning: the q, k and v biases are set to zero; the model will not compute what it was trained to")
        output = make_way(values, everyone)
        say_licence(source)
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
            )
    say(f"{layout.parameter_count:,} parameters in {time.perf_counter() - start:.1f} s")
    if everyone.is_first:
        print(output.place)


def run(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
