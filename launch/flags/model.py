"""Flags of the model that a launcher generates with, and that model on its mesh: shared by every one that does."""

from __future__ import annotations

from pathlib import Path

from absl import flags

from checkpoints import DEMO, VERIFY, CheckpointFolder, LoadedBytes, open_folder
from launch.hosts.preflight import agree_on_programs
from launch.process.startup import progress_bar, say, this_host
from runtime import (
    ATTENTION_IMPLEMENTATIONS,
    CACHE_DTYPES,
    QUANTIZATIONS,
    STORED_DTYPES,
    Engine,
    InputError,
    MeshSpec,
    ModelConfig,
    TextTokenizer,
    parse_config,
)


def default_name(folder: CheckpointFolder) -> str:
    """How clients call a checkpoint: a Hub name whole, as they know it; of a folder or a URL its last part."""
    local = Path(folder.name).expanduser()
    return local.absolute().name if "://" in folder.name or local.is_dir() else folder.name


def define_model_flags(values: flags.FlagValues) -> None:
    """Define them."""

    def string(name: str, default: str | None, text: str) -> None:
        flags.DEFINE_string(name, default, text, flag_values=values)

    def choice(name: str, default: str | None, choices: tuple[str, ...], text: str) -> None:
        flags.DEFINE_enum(name, default, choices, text, flag_values=values)

    string("checkpoint", str(DEMO), "Model folder, URL (gs://...) or Hub name. Default: the demo in the package.")
    string("revision", None, "Branch, tag or commit on the Hub. A token is read from HF_TOKEN or the Hub's login.")
    flags.DEFINE_bool("offline", False, "Use only what the Hub's local cache holds.", flag_values=values)
    choice("verify", "full", VERIFY, "What of the checkpoint's manifest of digests to check.")
    string("mesh", None, "For example data=2,sequence=1,tensor=4; one may be -1. Default: chosen and printed.")
    choice("dtype", None, STORED_DTYPES, "Default: as stored, and float32 on CPU.")
    choice("attention", "auto", ATTENTION_IMPLEMENTATIONS, "Attention implementation.")
    choice("quantize", "none", QUANTIZATIONS, "int8: weights as integers, a scale for each output channel.")
    choice("kv_cache", "model", CACHE_DTYPES, "Dtype of keys and values that are kept.")


def check_named(values: flags.FlagValues) -> None:
    """Check that ``--checkpoint`` names something.

    Raises:
      InputError: it is empty, as when a shell variable is not set.
    """
    if not values.checkpoint:
        raise InputError(
            "--checkpoint is empty: name a folder, a URL or a Hub name, or leave the flag out for the demo"
        )


def open_checkpoint(values: flags.FlagValues) -> tuple[CheckpointFolder, ModelConfig]:
    """The folder that flags name, and its model. Nothing is loaded, and no device touched.

    Raises:
      InputError: there is none, it is not a model's, or ``--mesh`` names no mesh.
    """
    check_named(values)
    folder = open_folder(values.checkpoint, revision=values.revision, offline=values.offline)
    model = parse_config(folder.config)
    if values.mesh is not None:
        MeshSpec.parse(values.mesh)
    return folder, model


def read_tokenizer(folder: CheckpointFolder) -> TextTokenizer:
    """The folder's tokenizer.

    Raises:
      InputError: it has none.
    """
    tokenizer = TextTokenizer.from_folder(folder)
    if tokenizer is None:
        raise InputError(f"{folder.name}: no tokenizer in this folder; it serves the token-level Python calls only")
    return tokenizer


def load_engine(values: flags.FlagValues, folder: CheckpointFolder, rows: int, max_batch: int | None = None) -> Engine:
    """Load the model onto its mesh, after :func:`launch.process.startup.start_devices`. Every host calls this.

    Args:
      values: parsed :func:`define_model_flags`.
      folder: the checkpoint.
      rows: that there will be, for the default mesh.
      max_batch: rows on the devices at a time; None for what memory allows.
    """
    with progress_bar("loading weights", of_bytes=True) as progress:
        engine = Engine.load(
            folder,
            values.mesh,
            values.dtype,
            attention=values.attention,
            max_batch=max_batch,
            quantize=values.quantize,
            kv_cache=values.kv_cache,
            rows=rows,
            verify=values.verify,
            progress=progress,
        )
    engine.runner.programs.before_run = agree_on_programs(this_host())
    lines = [*engine.notes, *([] if engine.loaded is None else [describe_loaded(engine.loaded)])]
    # A launcher that has the flag is quiet without it.
    for line in lines if "verbose" not in values or values.verbose else ():
        say(line)
    return engine


def describe_loaded(loaded: LoadedBytes) -> str:
    """What every host has read of the checkpoint and holds of the weights, in a line. All hosts call it."""
    sizes = this_host().gather("loaded", [loaded.bytes_read / 1e9, loaded.bytes_held / 1e9])
    hosts = "; ".join(f"host {host} read {read:.3f}, holds {held:.3f}" for host, (read, held) in enumerate(sizes))
    return f"weights, GB: {loaded.bytes_stored / 1e9:.3f} stored; {hosts}"
