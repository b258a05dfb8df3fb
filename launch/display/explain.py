"""``--explain``: a table of how every weight is laid out on a mesh, and what the layout costs."""

from __future__ import annotations

import dataclasses
import math

import jax
from absl import flags
from rich import box
from rich.table import Table

from launch.display.console import PipedConsole
from launch.process.startup import is_main_process, start_devices
from runtime import (
    CheckpointFolder,
    MeshSpec,
    ModelConfig,
    ModelLayout,
    default_mesh,
    draft_model,
    model_layout,
    partition_spec,
    shard_shape,
)


def explain(
    values: flags.FlagValues,
    folder: CheckpointFolder,
    model: ModelConfig,
    spec: MeshSpec | None,
    draft: CheckpointFolder | None = None,
) -> None:
    """Print the layout for a mesh, or for the default mesh if ``spec`` is None, which has room for the draft model too.

    Devices are used only if ``spec`` is None or one of its sizes is -1.
    """
    dtype = values.dtype or model.dtype
    quantization = values.quantize if folder.quantization == "none" else folder.quantization
    if spec is None or -1 in dataclasses.astuple(spec):
        start_devices(values)
        devices = jax.devices()
        rows = max(1, len(values.prompt) + len(values.prompt_file)) * values.num_return_sequences
        rows = min(rows, values.max_batch or rows)
        dtype = values.dtype or ("float32" if devices[0].platform == "cpu" else model.dtype)
        beside = draft_model(draft, values.quantize)
        chosen = spec or default_mesh(model, devices, dtype, rows, quantization, beside)
        spec = chosen.resolve(len(devices))
    if is_main_process():
        print_layout(model_layout(model, spec, quantization=quantization), dtype)


def print_layout(layout: ModelLayout, dtype: str) -> None:
    """Print a row per weight: logical axes, partition spec, global shape, bytes per device, replication, padding.

    Replication is the number of devices that hold each element; padding is the share of added zeros.

    Args:
      layout: the model on a mesh; no device is used.
      dtype: dtype of the weights that are not quantized.
    """
    table = Table(box=box.SIMPLE_HEAD, title=f"{layout.config.family.name} on {layout.spec}, {dtype}")
    for name in ("weight", "logical axes", "partition spec", "global shape"):
        table.add_column(name, overflow="fold")
    for name in ("bytes/device", "replicas", "padding"):
        table.add_column(name, justify="right")
    total = stored = canonical = 0
    for leaf in layout.leaves:
        local, whole = math.prod(shard_shape(leaf, layout)), math.prod(leaf.padded_shape)
        used = math.prod(leaf.shape)
        table.add_row(
            leaf.name,
            ", ".join(leaf.axes),
            str(tuple(partition_spec(leaf, layout))),
            " x ".join(map(str, leaf.padded_shape)),
            f"{layout.leaf_bytes_per_device(leaf, dtype):,}",
            f"{local * layout.spec.size // whole}",
            f"{100 * (whole - used) / used:.2f} %",
        )
        total, stored, canonical = total + local, stored + whole, canonical + used
    console = PipedConsole(240)
    console.print(table)
    heads, gigabytes = layout.heads, layout.bytes_per_device(dtype) / 1e9
    console.print(
        f"{canonical:,} parameters; {gigabytes:.3f} GB per device on {layout.spec.size} devices, "
        f"replication {total * layout.spec.size / stored:.2f}x, padding {100 * (stored - canonical) / canonical:.2f} %"
        f"\ntensor={layout.spec.tensor} is kv={heads.kv} x group={heads.group}; {heads.queries_per_kv} query heads per "
        f"KV head are stored as {heads.padded_queries_per_kv}"
        + ("" if heads.shards_group else "; attention is replicated over group"),
        highlight=False,
    )
