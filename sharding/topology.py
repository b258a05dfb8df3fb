"""Descriptions of accelerator chips and of machines built from them, for planning without the hardware.

A topology is written like the names under which machines are sold: ``v5e:2x4`` (a TPU slice by its shape in chips),
``v5e-8`` (the same slice by its accelerator type), ``2xv5e:16x16`` (two slices), ``8xh100`` (a GPU host), ``2x8xh200``
(two hosts of eight GPUs). Rates are the vendors' peaks in bytes and operations per second, without sparsity, from
Google Cloud's page on each TPU version, NVIDIA's data sheets of A100, H100, H200 and L4, and NVIDIA's Ada whitepaper
for the RTX 4090. Those of TPUs are rounded as in "How to Scale Your Model" (jax-ml.github.io/scaling-book), whose rates
of links are a tenth below Google's. Rates that vendors do not publish are marked as assumptions.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from sharding.errors import MeshError

MAX_HOSTS = 4096
_GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """One type of accelerator.

    Attributes:
      name: the name that users write.
      platform: JAX's name for the platform.
      device_kind: JAX's name for the chip.
      memory_bytes: bytes of device memory.
      usable_bytes: bytes that programs can use: the compiler's limit on TPU, JAX's default pool (3/4) on GPU.
      fast_memory_bytes: bytes of on-chip memory (VMEM, or CMEM on v4) in which the compiler keeps large arrays; 0 if it
        was not seen to do so.
      memory_bandwidth: bytes per second.
      flops: bfloat16 operations per second.
      int8_ops: int8 operations per second.
      link_bandwidth: bytes per second that one link of a TPU, or the NVLink connection of a GPU, carries in each
        direction.
      network_bandwidth: assumed bytes per second that one chip sends to other hosts (GPU, each with its own network
        card) or to other slices (TPU).
      chips_per_host: maximum number of chips of one host.
      torus_dimensions: dimensions of a TPU's interconnect; 0 for GPUs, which a switch connects.
      cores_in_name: how many units one chip stands for in an accelerator type such as ``v4-32``. For v4 and v5p, the
        number counts TensorCores, of which a chip has two; for v5e and v6e, it counts chips.
    """

    name: str
    platform: Literal["tpu", "gpu"]
    device_kind: str
    memory_bytes: int
    usable_bytes: int
    fast_memory_bytes: int
    memory_bandwidth: float
    flops: float
    int8_ops: float
    link_bandwidth: float
    network_bandwidth: float
    chips_per_host: int
    torus_dimensions: int
    cores_in_name: int = 1


def _tpu(
    name: str, kind: str, gib: int, usable_gib: float, fast_mib: int, bandwidth: float, tera: float, int8: float,
    link: float, network: float, dimensions: int,
) -> Chip:  # fmt: skip
    hosts = {2: 8, 3: 4}[dimensions]
    return Chip(
        name, "tpu", kind, gib * _GIB, int(usable_gib * _GIB), fast_mib << 20, bandwidth * 1e12, tera * 1e12,
        int8 * 1e12, link * 1e9, network * 1e9, hosts, dimensions, 2 if dimensions == 3 else 1,
    )  # fmt: skip


def _gpu(
    name: str, kind: str, gib: float, bandwidth: float, tera: float, int8: float, link: float, network: float
) -> Chip:
    return Chip(
        name, "gpu", kind, int(gib * _GIB), int(0.75 * gib * _GIB), 0, bandwidth * 1e12, tera * 1e12, int8 * 1e12,
        link * 1e9, network * 1e9, 8, 0,
    )  # fmt: skip


# Network bandwidths are assumptions: 400 Gb/s InfiniBand per GPU for H100 and H200, 200 Gb/s for A100, 25 Gb/s of the
# host's network for L4 and RTX 4090, and 50 Gb/s per TPU chip. L4 and RTX 4090 have no NVLink; their link is PCIe 4.0
# x16. Of the 24 GiB of an L4, its error correction leaves 22.5.
CHIPS = {
    chip.name: chip
    for chip in (
        _tpu("v4", "TPU v4", 32, 31.25, 128, 1.2, 275, 275, 45, 6.25, 3),
        _tpu("v5e", "TPU v5 lite", 16, 15.75, 128, 0.81, 197, 394, 45, 6.25, 2),
        _tpu("v5p", "TPU v5", 95, 94.75, 0, 2.8, 459, 918, 90, 6.25, 3),
        _tpu("v6e", "TPU v6 lite", 32, 31.25, 128, 1.6, 920, 1840, 90, 6.25, 2),
        _gpu("l4", "NVIDIA L4", 22.5, 0.3, 121, 242, 32, 3.125),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", 24, 1.008, 165, 660, 32, 3.125),
        _gpu("a100-40gb", "NVIDIA A100-SXM4-40GB", 40, 1.555, 312, 624, 300, 25),
        _gpu("a100", "NVIDIA A100-SXM4-80GB", 80, 2.0, 312, 624, 300, 25),
        _gpu("h100", "NVIDIA H100 80GB HBM3", 80, 3.35, 990, 1980, 450, 50),
        _gpu("h200", "NVIDIA H200", 141, 4.8, 990, 1980, 450, 50),
    )
}

# Stands in for an accelerator that is not in CHIPS. Only the ratios of its rates matter.
UNKNOWN_CHIP = Chip("unknown", "gpu", "unknown", 0, 0, 0, 1e12, 2e14, 4e14, 5e10, 1e10, 1 << 20, 0)

# Other names for these chips.
_ALIASES = {
    "v5litepod": "v5e", "a100-80gb": "a100", "h100-80gb": "h100", "h200-141gb": "h200", "4090": "rtx4090",
    "rtx-4090": "rtx4090",
}  # fmt: skip

# Shapes of the slices that TPU generations with a two-dimensional interconnect have.
_FLAT_SLICES: tuple[tuple[int, ...], ...] = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
# Shapes of the slices below a 4x4x4 cube that generations with a three-dimensional interconnect have. In larger
# slices, every side is a multiple of 4.
_SMALL_SLICES: tuple[tuple[int, ...], ...] = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_LARGEST_SIDE = 28
# Chips of a v4 pod, and of the largest job that a v5p pod runs (Google Cloud's pages on these versions).
_LARGEST_SLICES = {"v4": 4096, "v5p": 6144}


@dataclass(frozen=True)
class Topology:
    """A machine: a number of chips and how they are connected.

    Attributes:
      chip: type of the chips.
      shape: shape of one TPU slice in chips, or ``(n,)`` for n GPUs per host.
      count: number of TPU slices or GPU hosts.
    """

    chip: Chip
    shape: tuple[int, ...]
    count: int = 1

    @property
    def num_devices(self) -> int:
        """Total number of chips; each is one JAX device."""
        return self.count * math.prod(self.shape)

    @property
    def num_slices(self) -> int:
        """Number of TPU slices; 1 for GPUs."""
        return self.count if self.chip.platform == "tpu" else 1

    @property
    def shape_name(self) -> str:
        """The shape of one slice in the vendor's notation, such as ``v5e:2x4``."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def wraps(self) -> tuple[bool, ...]:
        """For each dimension of a slice, whether its ends are connected to form a ring."""
        if self.chip.torus_dimensions == 2:
            return tuple(side == 16 for side in self.shape)
        cube = all(side % 4 == 0 for side in self.shape)
        return (cube,) * len(self.shape)

    def __str__(self) -> str:
        prefix = f"{self.count}x" if self.count > 1 else ""
        return prefix + (self.shape_name if self.chip.platform == "tpu" else f"{self.shape[0]}x{self.chip.name}")


@dataclass(frozen=True)
class Place:
    """The place of a chip in a topology. It stands in for a JAX device when devices are arranged into a mesh.

    Attributes:
      id: number of the device.
      platform: ``tpu`` or ``gpu``.
      device_kind: JAX's name for the chip.
      coords: position within the slice, ``(x, y, z)``.
      core_on_chip: always 0, because a chip is one device.
      slice_index: index of the slice.
      process_index: index of the host.
    """

    id: int
    platform: str
    device_kind: str
    coords: tuple[int, int, int]
    core_on_chip: int
    slice_index: int
    process_index: int


def chip_of(device: Any) -> Chip | None:
    """Return the type of a JAX device: :data:`UNKNOWN_CHIP` for other accelerators, and None for a CPU."""
    known = (chip for chip in CHIPS.values() if chip.device_kind == device.device_kind)
    return None if device.platform == "cpu" else next(known, UNKNOWN_CHIP)


def parse_topology(text: str) -> Topology:
    """Parse a topology such as ``v5e:2x4``, ``v5e-8``, ``2xv5e:16x16``, ``8xH100`` or ``2x8xh200``.

    Case is ignored, and so are spaces and the vendor's name.

    Raises:
      MeshError: the notation is wrong, the chip is unknown, or the slice does not exist.
    """
    spellings = "write for example v5e-8 or v5e:2x4, 2xv5e:16x16 (two slices), 8xh100 or 2x8xh200 (two hosts)"
    found = re.fullmatch(
        r"(?:(?P<count>\d{1,4})x)?(?:(?P<chips>\d{1,4})x)?"
        r"(?P<name>[a-z][a-z\d]*(?:-\d+gb|-4090)?|4090)(?::(?P<shape>\d{1,3}(?:x\d{1,3})*)|-(?P<size>\d{1,5}))?",
        _plain_name(text),
    )
    if found is None:
        raise MeshError(f'topology "{text}" cannot be read; {spellings}')
    name = _ALIASES.get(found["name"], found["name"])
    chip = CHIPS.get(name)
    if chip is None:
        raise MeshError(
            f'topology "{text}": unknown chip "{found["name"]}"; known chips: {", ".join(CHIPS)}; {spellings}'
        )
    sized = found["shape"] is not None or found["size"] is not None
    if (chip.platform == "tpu") != sized or (sized and found["chips"] is not None):
        right = f"{name}:{'x'.join(['2'] * chip.torus_dimensions)}" if chip.platform == "tpu" else f"8x{name}"
        raise MeshError(f'topology "{text}": for {name}, write a form such as {right}; {spellings}')
    count = int(found["count"] or 1)
    if found["shape"] is not None:
        shape = tuple(map(int, found["shape"].split("x")))
        _check_slice(text, chip, shape)
    elif found["size"] is not None:
        shape = _shape_of_size(text, chip, int(found["size"]))
    else:
        count, shape = (count, (int(found["chips"]),)) if found["chips"] else (1, (count,))
        if not 1 <= shape[0] <= chip.chips_per_host:
            raise MeshError(
                f'topology "{text}": a host has 1 to {chip.chips_per_host} {name}; write several hosts as '
                f"2x{chip.chips_per_host}x{name}"
            )
    if not 1 <= count <= MAX_HOSTS:
        raise MeshError(f'topology "{text}": expected 1 to {MAX_HOSTS} slices or hosts')
    return Topology(chip, shape, count)


def _plain_name(text: str) -> str:
    """Rewrite a name such as ``NVIDIA A100 80GB x8`` as the notation ``8xa100-80gb`` that the parser reads."""
    name = re.sub(r"^(nvidia|tpu|geforce)[ -]+", "", text.strip().lower())
    name = re.sub(r"[ -]+", "-", re.sub(r"(?<=\d) *x *(?=[a-z\d])", "x", name))
    counted = re.fullmatch(r"(?P<chip>.+?)-?x(?P<chips>\d{1,4})", name)
    if counted is not None and _ALIASES.get(counted["chip"], counted["chip"]) in CHIPS:
        return f"{counted['chips']}x{counted['chip']}"
    return name


def _shape_of_size(text: str, chip: Chip, size: int) -> tuple[int, ...]:
    """Return the shape of the slice whose accelerator type ends with ``size``, such as 8 in ``v5e-8``."""
    chips, rest = divmod(size, chip.cores_in_name)
    found = None if rest else machine_of(chip, chips)
    if found is None:
        what = "chips" if chip.cores_in_name == 1 else f"TensorCores ({chip.cores_in_name} per chip)"
        example = f"{chip.name}:{'x'.join(['4'] * chip.torus_dimensions)}"
        raise MeshError(
            f'topology "{text}": {chip.name} has no such slice of {size} {what}; write its shape, such as {example}'
        )
    return found.shape


def _check_slice(text: str, chip: Chip, shape: tuple[int, ...]) -> None:
    if chip.torus_dimensions == 2:
        exists, known = shape in _FLAT_SLICES, _FLAT_SLICES
        rule = ", ".join("x".join(map(str, one)) for one in known)
    else:
        cubes = len(shape) == 3 and all(0 < side <= _LARGEST_SIDE and side % 4 == 0 for side in shape)
        whole = cubes and list(shape) == sorted(shape) and math.prod(shape) <= _LARGEST_SLICES[chip.name]
        exists, known = shape in _SMALL_SLICES or whole, _SMALL_SLICES
        rule = ", ".join("x".join(map(str, one)) for one in known) + ", and ascending multiples of 4 such as 4x4x8"
    if not exists:
        raise MeshError(f'topology "{text}": {chip.name} has no such slice; it has {rule}')


def places(topology: Topology) -> list[Place]:
    """Return the places of a topology's chips, in the order in which JAX lists the devices of such a machine."""
    chip = topology.chip
    found: list[Place] = []
    if chip.platform == "gpu":
        for host, _ in itertools.product(range(topology.count), range(topology.shape[0])):
            found.append(Place(len(found), "gpu", chip.device_kind, (0, 0, 0), 0, 0, host))
        return found
    x, y, z = (*topology.shape, 1)[:3]
    # A slice of several hosts has 2 x 2 chips on each of them, also where one host alone may have eight.
    side = 2 if x * y * z > chip.chips_per_host else max(x, y, z)
    hosts: dict[tuple[int, ...], int] = {}
    for index in range(topology.count):
        for coords in itertools.product(range(z), range(y), range(x)):
            at = (coords[2], coords[1], coords[0])
            own = (index, at[0] // side, at[1] // side, at[2] if side == 2 else 0)
            host = hosts.setdefault(own, len(hosts))
            found.append(Place(len(found), "tpu", chip.device_kind, at, 0, index, host))
    return found


def machine_of(chip: Chip, count: int) -> Topology | None:
    """Return the machine with this many chips; None if there is no such machine.

    It is one TPU slice, one host with this many GPUs, or several GPU hosts whose GPUs are all used.
    """
    if chip.platform == "gpu":
        if count <= chip.chips_per_host:
            return Topology(chip, (count,))
        hosts, rest = divmod(count, chip.chips_per_host)
        return None if rest else Topology(chip, (chip.chips_per_host,), hosts)
    shapes = list(_FLAT_SLICES if chip.torus_dimensions == 2 else _SMALL_SLICES)
    if chip.torus_dimensions == 3:
        cubes = itertools.combinations_with_replacement(range(4, _LARGEST_SIDE + 1, 4), 3)
        largest = _LARGEST_SLICES[chip.name]
        shapes += sorted((one for one in cubes if math.prod(one) <= largest), key=lambda shape: shape[2] - shape[0])
    return next((Topology(chip, shape) for shape in shapes if math.prod(shape) == count), None)
