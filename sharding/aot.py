"""Devices to compile for without the hardware: TPU slices through libtpu, GPU hosts through JAX's CUDA plugin.

Programs can be compiled for these devices, but not run. The process that compiles them must not look for real
accelerators, so set ``AOT_ENVIRONMENT`` before JAX first accesses its devices.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

from sharding.errors import MeshError
from sharding.topology import Topology

AOT_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # For libtpu: describe a slice instead of looking for one, and do not open a chip that another process may use.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # For the CUDA plugin: do not require a driver.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}

# Options of the TPU compiler for generations with a three-dimensional interconnect.
_CUBIC: dict[str, Any] = {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1)}

# Properties of a chip that the GPU compiler needs: number of cores (SMs), float32 units per core, shared memory per
# core and per block in bytes, L2 cache in bytes, clock in GHz, compute capability.
_GPU_CORES: dict[str, tuple[int, int, int, int, int, float, tuple[int, int]]] = {
    "l4": (58, 128, 102400, 101376, 50331648, 2.04, (8, 9)),
    "rtx4090": (128, 128, 102400, 101376, 75497472, 2.52, (8, 9)),
    "a100-40gb": (108, 64, 167936, 166912, 41943040, 1.41, (8, 0)),
    "a100": (108, 64, 167936, 166912, 41943040, 1.41, (8, 0)),
    "h100": (132, 128, 233472, 232448, 52428800, 1.98, (9, 0)),
    "h200": (132, 128, 233472, 232448, 52428800, 1.98, (9, 0)),
}
_TARGET = """
gpu_device_info {{
  core_count: {cores} fpus_per_core: {units} threads_per_warp: 32 threads_per_block_limit: 1024
  threads_per_core_limit: 2048 shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {block} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock} device_memory_size: {memory}
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{kind}"
"""


def missing_compiler(platform: str) -> str | None:
    """Return what to install to compile programs for ``tpu`` or ``gpu``; None if the compiler is installed."""
    if platform == "tpu":
        return None if importlib.util.find_spec("libtpu") else "pip install -e '.[tpu]' in the checkout (libtpu)"
    try:
        found = any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (13, 12))
    except ModuleNotFoundError:  # no JAX plugin at all
        found = False
    return None if found else "pip install -e '.[cuda]' in the checkout (JAX's CUDA plugin; no GPU is needed)"


def aot_devices(topology: Topology) -> list[Any]:
    """Return the devices of a topology, to compile programs for.

    Raises:
      MeshError: the compiler for this platform is not installed, or rejects the topology.
    """
    from jax.experimental import topologies

    chip = topology.chip
    install = missing_compiler(chip.platform)
    if install is not None:
        raise MeshError(f"compiling for {topology} requires a compiler that is not installed: {install}")
    try:
        if chip.platform == "gpu":
            found = topologies.get_topology_desc(
                str(topology),
                platform="cuda",
                target_config=_gpu_target(topology),
                topology=f"1x{topology.count}x{topology.shape[0]}",
            )
        else:
            options: dict[str, Any] = dict(_CUBIC) if chip.torus_dimensions == 3 else {}
            if math.prod(topology.shape) == 1:
                options["chips_per_host_bounds"] = (1, 1, 1)
            if topology.num_slices > 1:
                options["num_slices"] = topology.num_slices
            found = topologies.get_topology_desc(platform="tpu", topology_name=topology.shape_name, **options)
    except Exception as error:  # each plugin raises its own exception types
        raise MeshError(f"topology {topology}: {error}") from error
    return list(found.devices)


def _gpu_target(topology: Topology) -> str:
    chip = topology.chip
    cores, units, shared, block, cache, clock, capability = _GPU_CORES[chip.name]
    return _TARGET.format(
        cores=cores,
        units=units,
        shared=shared,
        block=block,
        cache=cache,
        clock=clock,
        capability=capability,
        bandwidth=int(chip.memory_bandwidth),
        memory=chip.memory_bytes,
        kind=chip.device_kind,
    )
