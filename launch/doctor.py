"""Check a machine: for a bug report, or before the first run on new hardware.

  diffumesh doctor                                        the devices of this machine, or of all hosts
  diffumesh doctor --checkpoint=DIR --mesh=data=2,tensor=8    this checkpoint, and each axis of this mesh

Reports versions, relevant environment variables, devices and their memory, the meshes on which the checkpoint's model
can be sharded and fits in memory, whether collectives over each axis compute correct sums, their bandwidth, whether
every byte of the checkpoint is intact, and the state of the compile cache. A checkpoint on the Hub is downloaded first.
With several hosts, start it on all of them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from absl import flags

from checkpoints import DEMO, CheckpointFolder, check_weights, folder_fingerprint, read_manifest, verify
from launch.flags.model import check_named, read_mesh
from launch.folders.models import open_named
from launch.process.collectives import collective_lines, probe_mesh
from launch.process.compile_cache import cache_lines
from launch.process.environment import version_lines
from launch.process.real_flags import define_real
from launch.process.startup import (
    define_device_flags,
    is_main_process,
    progress_bar,
    run_launcher,
    start_devices,
    this_host,
)
from launch.process.streams import drop_output
from runtime import (
    WEIGHT_MEMORY_SHARE,
    MeshSpec,
    ModelConfig,
    default_mesh,
    model_layout,
    parse_config,
    tensor_sizes,
    weight_bytes,
)
from runtime.planner import device_memory, held_dtype, weights_class

# The flags that --help shows; --helpfull shows all.
FIRST_FLAGS = ("checkpoint", "mesh", "megabytes", "devices", "compile_cache", "num_processes")


def define_flags(values: flags.FlagValues) -> None:
    """Define the flags of this command."""
    flags.DEFINE_string(
        "checkpoint", str(DEMO), "Folder, URL or Hub name to verify. Default: the demo.", flag_values=values
    )
    flags.DEFINE_string(
        "mesh",
        None,
        "Mesh to test collectives on, such as data=2,tensor=4. Default: data over hosts, tensor within each.",
        flag_values=values,
    )
    define_real("megabytes", 16.0, "Size of each collective per device, in megabytes.", 0.001, 4096.0, values=values)
    define_device_flags(values)


def device_lines(devices: Sequence[Any]) -> Iterator[str]:
    """Yield lines with the kind, number and memory of devices, and with the devices of each host."""
    host = this_host()
    yield f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}) on {host.count} host(s)"
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if len(slices) > 1:
        yield f"{len(slices)} slices"
    memory = device_memory(jax.local_devices()[0])
    yield f"memory per device: {'unknown' if memory is None else f'{memory / 1e9:.1f} GB'}"
    for process_index in range(host.count):
        own = [str(device.id) for device in devices if device.process_index == process_index]
        yield f"host {process_index}: devices {', '.join(own)}"


def mesh_lines(config: ModelConfig, devices: Sequence[Any], dtype: str, quantization: str = "none") -> Iterator[str]:
    """Yield lines with the sizes of the tensor axis that the model allows, their memory, and the default mesh.

    ``dtype`` and ``quantization`` are those of the stored weights. Devices keep the quantization, CPUs not the dtype.
    """
    dtype = held_dtype(dtype, devices[0].platform)
    memory, kept = device_memory(jax.local_devices()[0]), dtype if quantization == "none" else quantization
    for size in tensor_sizes(config, weights_class(config), len(devices), quantization):
        needed = weight_bytes(model_layout(config, MeshSpec(tensor=size), quantization=quantization), dtype)
        room = ""
        if memory is not None:
            room = "fits" if needed <= WEIGHT_MEMORY_SHARE * memory else "tight" if needed < memory else "does not fit"
        yield f"tensor={size:<4} {needed / 1e9:8.3f} GB of {kept} weights on each device  {room}"
    spec = default_mesh(config, devices, dtype, len(devices), quantization)
    yield f"for a batch of {len(devices)}: --mesh={spec}"


def checkpoint_lines(folder: CheckpointFolder) -> Iterator[str]:
    """Yield lines with the checkpoint's path and fingerprint, and whether its bytes match their digests."""
    yield f"{folder.path}, fingerprint {folder_fingerprint(folder)}"
    if read_manifest(folder) is None:
        advice = "" if folder.fetched else " (diffumesh verify --write_manifest writes one)"
        yield f"no manifest of digests: nothing to verify against{advice}"
        return
    start = time.perf_counter()
    with progress_bar("verifying", of_bytes=True) as progress:
        count = verify(folder, progress=progress)
    yield f"{count:,} bytes intact ({count / (time.perf_counter() - start) / 1e9:.2f} GB/s)"


def section(title: str, lines: Iterator[str]) -> None:
    """Print a section on host 0, line by line."""
    for line in itertools.chain([f"\n## {title}"], lines):
        try:
            if is_main_process():
                print(line, flush=True)
        except BrokenPipeError:
            if this_host().count == 1:
                raise
            # The reader is gone, but the other hosts wait for this one in the collectives of later lines.
            drop_output()


def main(values: flags.FlagValues) -> None:
    """Run ``diffumesh doctor``: print the report, section by section."""
    spec = read_mesh(values)
    check_named(values)
    folder = open_named(values.checkpoint)
    config = parse_config(folder.config)
    section("versions", version_lines())
    start_devices(values, {"checkpoint": folder_fingerprint(folder)})
    devices = jax.devices()
    section("devices", device_lines(devices))
    dtype = check_weights(folder, model_layout(config), "none") or config.dtype
    section("meshes for this checkpoint", mesh_lines(config, devices, dtype, folder.quantization))
    mesh = probe_mesh(spec, devices)
    section("collectives", collective_lines(mesh, values.megabytes))
    section("checkpoint", checkpoint_lines(folder))
    section("compile cache", cache_lines(values.compile_cache))


def run(argv: Sequence[str] | None = None) -> None:
    """Run ``diffumesh doctor`` from the command line."""
    run_launcher(main, define_flags, __doc__ or "", argv, FIRST_FLAGS)


if __name__ == "__main__":
    run()
