"""Flags that select a model and its mesh, and the checkpoint and engine made from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from absl import flags

from checkpoints import DEMO, VERIFY, CheckpointFolder, LoadedBytes
from launch.folders.models import define_lora_flag, open_named, read_lora
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
    folder_fingerprint,
    open_draft,
    parse_config,
)


def default_name(folder: CheckpointFolder) -> str:
    """Return the name under which a checkpoint is served: its Hub name, or the last part of its folder or URL."""
    local = Path(folder.name).expanduser()
    return local.absolute().name if "://" in folder.name or local.is_dir() else folder.name


def define_model_flags(values: flags.FlagValues) -> None:
    """Define the flags that select a model and its mesh."""

    def string(name: str, default: str | None, text: str) -> None:
        flags.DEFINE_string(name, default, text, flag_values=values)

    def choice(name: str, default: str | None, choices: tuple[str, ...], text: str) -> None:
        flags.DEFINE_enum(name, default, choices, text, flag_values=values)

    string("checkpoint", str(DEMO), "Model folder, URL (gs://...) or Hub name. Default: the demo in the package.")
    string(
        "revision",
        None,
        "Branch, tag or commit of the checkpoint on the Hub. A token is read from HF_TOKEN or the Hub's login.",
    )
    flags.DEFINE_bool("offline", False, "Use only folders here and the Hub's local cache.", flag_values=values)
    define_lora_flag(values)
    string(
        "draft_checkpoint",
        None,
        "Draft model of an autoregressive model: folder, URL or Hub name of a smaller model with the same vocabulary. "
        "It guesses the next --draft_tokens tokens.",
    )
    string("draft_revision", None, "Branch, tag or commit of the draft model on the Hub. Default: the newest.")
    choice(
        "verify",
        "full",
        VERIFY,
        "What to check while loading: the digests of all that is read (full), only shapes, dtypes and small files "
        "(sizes), or nothing (none).",
    )
    string(
        "mesh",
        None,
        "Devices per mesh axis, such as data=2,sequence=1,tensor=4; one axis may be -1 for all remaining devices. "
        "Default: chosen by the planner.",
    )
    choice("dtype", None, STORED_DTYPES, "Dtype of the weights. Default: float32 on CPU, otherwise as stored.")
    choice(
        "attention", "auto", ATTENTION_IMPLEMENTATIONS, "Attention kernel; auto chooses by platform, dtype and shape."
    )
    choice(
        "quantize",
        "none",
        QUANTIZATIONS,
        "int8: store weights as 8-bit integers with a scale per output channel; int4: as 4-bit integers with a scale "
        "per group of at most 64 weights, for devices whose memory is too small for int8.",
    )
    choice("kv_cache", "model", CACHE_DTYPES, "Dtype of the KV cache; model is the dtype of the weights.")


def check_named(values: flags.FlagValues) -> None:
    """Check that ``--checkpoint`` is not empty.

    Raises:
      InputError: it is empty, for example because a shell variable is not set.
    """
    if not values.checkpoint:
        raise InputError(
            "--checkpoint is empty: name a folder, a URL or a Hub name, or leave the flag out for the demo"
        )


def read_mesh(values: flags.FlagValues) -> MeshSpec | None:
    """Parse ``--mesh``. One axis may be -1. None if the flag is not given.

    Raises:
      MeshError: the mesh cannot be parsed.
    """
    return None if values.mesh is None else MeshSpec.parse(values.mesh)


def open_checkpoint(values: flags.FlagValues) -> tuple[CheckpointFolder, ModelConfig]:
    """Open the checkpoint folder, with its adapter if there is one, and parse the model's configuration.

    A Hub name is downloaded, weights included. No weights are loaded, and no device is used.

    Raises:
      InputError: a folder does not exist, or the checkpoint folder does not contain a supported model.
    """
    check_named(values)
    folder = open_named(values.checkpoint, revision=values.revision, offline=values.offline, lora=read_lora(values))
    return folder, parse_config(folder.config)


def open_draft_checkpoint(values: flags.FlagValues, folder: CheckpointFolder) -> CheckpointFolder | None:
    """Open the draft model of ``--draft_checkpoint``, and check that it fits; None if the flag is not given.

    No weights are loaded, and no device is used.

    Args:
      values: parsed flags, as :func:`define_model_flags` defines them.
      folder: the model's checkpoint.

    Raises:
      InputError: the folder does not exist, or has no autoregressive model with the model's vocabulary; or only its
        revision is given.
    """
    if values.draft_checkpoint is None:
        if values.draft_revision is not None:
            raise InputError("--draft_revision requires --draft_checkpoint", field="draft_revision")
        return None
    if not values.draft_checkpoint:
        raise InputError("--draft_checkpoint is empty: name a folder, a URL or a Hub name", field="draft_checkpoint")
    draft = open_named(values.draft_checkpoint, revision=values.draft_revision, offline=values.offline)
    return open_draft(folder, draft, verify=values.verify)


def fingerprints(folder: CheckpointFolder, draft: CheckpointFolder | None) -> dict[str, str]:
    """Return what all hosts agree on about the checkpoints; see :func:`launch.process.startup.start_devices`."""
    found = {"checkpoint": folder_fingerprint(folder)}
    return found if draft is None else found | {"draft_checkpoint": folder_fingerprint(draft)}


def read_tokenizer(folder: CheckpointFolder) -> TextTokenizer:
    """Read the folder's tokenizer.

    Raises:
      InputError: the folder has no tokenizer.
    """
    tokenizer = TextTokenizer.from_folder(folder)
    if tokenizer is None:
        raise InputError(
            f"{folder.name}: no tokenizer in this folder; only the token-level Python calls work without one"
        )
    return tokenizer


def load_engine(
    values: flags.FlagValues,
    folder: CheckpointFolder,
    mesh: MeshSpec | None,
    rows: int,
    max_batch: int | None = None,
    draft: CheckpointFolder | None = None,
) -> Engine:
    """Load the model onto its mesh, after :func:`launch.process.startup.start_devices`. Every host calls this.

    Args:
      values: parsed flags, as :func:`define_model_flags` defines them.
      folder: the checkpoint.
      mesh: the result of :func:`read_mesh`; if None, a default mesh is chosen.
      rows: number of rows, for the choice of the default mesh.
      max_batch: maximum number of rows on the devices at a time; None for as many as memory allows.
      draft: the draft model, from :func:`open_draft_checkpoint`.
    """
    with progress_bar("loading weights", of_bytes=True) as progress:
        engine = Engine.load(
            folder,
            mesh,
            values.dtype,
            attention=values.attention,
            max_batch=max_batch,
            quantize=values.quantize,
            kv_cache=values.kv_cache,
            rows=rows,
            draft=draft,
            verify=values.verify,
            progress=progress,
        )
    engine.runner.programs.before_run = agree_on_programs(this_host())
    lines = [*engine.notes, *([] if engine.loaded is None else [describe_loaded(engine, engine.loaded)])]
    if folder.lora is not None:
        lines.append(f"Merged the LoRA adapter {folder.lora.name}")
    if draft is not None:
        lines.append(f"{draft.name} drafts tokens")
    # Commands with --verbose print these lines only with that flag.
    for line in lines if "verbose" not in values or values.verbose else ():
        say(line)
    return engine


def describe_loaded(engine: Engine, loaded: LoadedBytes) -> str:
    """Describe the size of the weights, stored and in memory, and each host's share. All hosts call this."""
    sizes = this_host().gather("loaded", [loaded.bytes_read / 1e9, loaded.bytes_held / 1e9])
    dtype = np.dtype(engine.dtype).name if engine.layout.quantization == "none" else engine.layout.quantization
    stored = "" if loaded.stored_dtype is None else f"{loaded.stored_dtype} "
    line = (
        f"Loaded {loaded.bytes_stored / 1e6:,.0f} MB of {stored}weights "
        f"({sum(held for _, held in sizes) * 1e3:,.0f} MB in memory as {dtype})"
    )
    if len(sizes) == 1:
        return line
    hosts = "; ".join(
        f"host {host} read {read:.3f} GB and holds {held:.3f} GB" for host, (read, held) in enumerate(sizes)
    )
    return f"{line}: {hosts}"
