"""Versions and environment variables of this host, for ``diffumesh doctor``."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from launch.hosts.preflight import version_facts
from runtime import AOT_ENVIRONMENT, InputError

# Environment variables that affect a run. Others are not shown, because the environment may hold secrets.
_SETTINGS = ("JAX_", "XLA_", "LIBTPU_INIT_ARGS", "TPU_", "CUDA_VISIBLE_DEVICES", "NCCL_", "TF_GPU_ALLOCATOR")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
# Files of TPU devices in /dev.
TPU_FILES = ("accel*", "vfio/*")
# Files of NVIDIA GPUs; where JAX finds none of them, it does not try to open a GPU. The last is that of Windows' WSL.
NVIDIA_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
# Packages with JAX's CUDA plugin.
_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def describe_absent_tpu() -> None:
    """If this machine has no TPU, describe one to libtpu by environment variables.

    Otherwise libtpu, where it is installed, prints four lines of errors because it cannot find out what TPU this is.
    Without the files of a device, it cannot open a TPU either way. Call this after the import of JAX, which looks for
    TPUs on the PCI bus, and before it opens devices. Where a TPU was asked for by name, libtpu's errors remain.
    """
    import jax

    if not _has_tpu() and os.environ.get("TPU_SKIP_MDS_QUERY") == "1" and not jax.config.values["jax_platforms"]:
        for name in ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"):
            os.environ.setdefault(name, AOT_ENVIRONMENT[name])


def check_platforms() -> None:
    """Check that the platforms that ``JAX_PLATFORMS`` names can be opened, as far as can be known without opening them.

    JAX fails with an empty assertion where a plugin is not installed, or where it finds no GPU.

    Raises:
      InputError: a platform's plugin is not installed, or this machine has no TPU or no NVIDIA GPU.
    """
    import jax

    named = jax.config.values["jax_platforms"] or ""
    wrong = f"JAX_PLATFORMS={named}: "
    names = [name for name in named.split(",") if name]
    for name in names:
        if name == "cuda" and not any(map(find_spec, _CUDA_PLUGINS)):
            raise InputError(f"{wrong}JAX's CUDA plugin is not installed; pip install -e '.[cuda]'")
        # Beside another platform, JAX leaves out an absent GPU.
        if names == ["cuda"] and not any(map(os.path.exists, NVIDIA_FILES)):
            raise InputError(f"{wrong}this machine has no NVIDIA GPU (none of {', '.join(NVIDIA_FILES)})")
        if name == "tpu" and find_spec("libtpu") is None:
            raise InputError(f"{wrong}libtpu is not installed; pip install -e '.[tpu]'")
        if name == "tpu" and not _has_tpu():
            raise InputError(
                f"{wrong}this machine has no TPU (no {' or '.join(f'/dev/{pattern}' for pattern in TPU_FILES)})"
            )


def _has_tpu() -> bool:
    return any(list(Path("/dev").glob(pattern)) for pattern in TPU_FILES)


def nvidia_driver() -> str | None:
    """Return the version of NVIDIA's kernel driver; None if it is not loaded."""
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", NVIDIA_DRIVER.read_text())
    except OSError:
        return None
    return found and found[0]


def version_lines() -> Iterator[str]:
    """Yield lines with versions, system and relevant environment variables."""
    for name, version in version_facts().items():
        yield f"{name:<12} {version}"
    yield f"{'system':<12} {platform.platform()}, {os.cpu_count()} processors"
    if (driver := nvidia_driver()) is not None:
        yield f"{'driver':<12} NVIDIA {driver}"
    for name in sorted(os.environ):
        if name.startswith(_SETTINGS) and not any(word in name for word in _SECRET):
            yield f"{name}={os.environ[name]}"
