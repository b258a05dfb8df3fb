"""The links between chips that each mesh axis uses, and how long collectives take on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sharding.errors import MeshError
from sharding.heads import HeadLayout
from sharding.mesh import MESH_AXES, MeshSpec, arrange_devices
from sharding.topology import Topology, places

# Assumed seconds for a message to reach a neighbouring chip. The times that vendors state are of this order.
HOP_SECONDS = {"interconnect": 1e-6, "NVLink": 3e-6, "network": 10e-6}


@dataclass(frozen=True)
class Link:
    """The connection between the chips that take part in a collective.

    Attributes:
      kind: ``interconnect`` (ICI of a TPU slice), ``NVLink``, or ``network`` (between hosts or slices; its speed is
        assumed).
      bandwidth: bytes per second that each chip can send in a collective while it receives as many.
      latency: fixed time of a collective in seconds, in addition to the transfer.
    """

    kind: str
    bandwidth: float
    latency: float

    def seconds(self, kind: str, payload: float, members: int) -> float:
        """Return the time of one collective with ring algorithms, in seconds.

        Args:
          kind: name of the HLO operation.
          payload: bytes of the whole array: the output of an all-gather, or the input of a reduce-scatter.
          members: number of chips that take part.
        """
        share = payload * (members - 1) / members
        return (2 if kind == "all-reduce" else 1) * (share / self.bandwidth + self.latency)


@dataclass(frozen=True)
class Wiring:
    """A mesh mapped onto the chips of a topology.

    Attributes:
      topology: the chips and their connections.
      spec: the mesh.
      heads: split of the mesh's tensor axis.
    """

    topology: Topology
    spec: MeshSpec
    heads: HeadLayout

    @cached_property
    def chips(self) -> np.ndarray:
        """The chips ``[data, sequence, kv, group]``, each a :class:`sharding.topology.Place`."""
        return arrange_devices(self.spec, self.heads, places(self.topology))

    @cached_property
    def _places(self) -> np.ndarray:
        """Place of every chip: ``[data, sequence, kv, group, 5]``; the last axis is (x, y, z, slice, host)."""
        rows = [(*place.coords, place.slice_index, place.process_index) for place in self.chips.flat]
        return np.array(rows).reshape(*self.chips.shape, 5)

    def check_hosts(self) -> None:
        """Check that the mesh can be mapped onto the chips, and that every host has one of them: every host takes part.

        Raises:
          MeshError: it cannot, or a host has none.
        """
        there = {place.process_index for place in places(self.topology)}
        if idle := sorted(there - set(self._places[..., 4].flat)):
            raise MeshError(
                f"mesh {self.spec} has no device of host {', '.join(map(str, idle))} of {self.topology}, but every "
                f"host takes part: use all {self.topology.num_devices} devices, for example with data=-1"
            )

    @property
    def slices(self) -> int:
        """Number of TPU slices that the mesh spans; 1 for GPUs."""
        return len(set(self._places[..., 3].flat))

    def link(self, axes: Sequence[str], inside_slices: bool = False) -> Link:
        """Return the link between the chips that a collective over these mesh axes joins.

        In a TPU slice, all torus dimensions that these chips span are used at once, and in both directions if the chips
        form a ring. GPUs of one host use NVLink. A collective over several GPU hosts runs as many rings at once
        as it has GPUs per host, each through its own network card. Its bandwidth is the sum over these cards, but at
        most that of NVLink, which all rings share within a host.

        Args:
          axes: mesh axes of the collective.
          inside_slices: consider only the chips of one slice.
        """
        chip, group = self.topology.chip, self._group(axes, inside_slices)
        if chip.platform == "gpu":
            hosts, cards = np.unique(group[:, 4], return_counts=True)
            if len(hosts) == 1:
                return Link("NVLink", chip.link_bandwidth, HOP_SECONDS["NVLink"])
            bandwidth = min(int(cards.min()) * chip.network_bandwidth, chip.link_bandwidth)
            return Link("network", bandwidth, (len(hosts) - 1) * HOP_SECONDS["network"])
        spans = [len(set(group[:, column])) for column in range(4)]
        # Slices are connected by the network. Hosts within a slice are connected by the interconnect.
        if spans[3] > 1:
            return Link("network", chip.network_bandwidth, (spans[3] - 1) * HOP_SECONDS["network"])
        sides = (*self.topology.shape, 1)[:3]
        wraps = (*self.topology.wraps, False)[:3]
        directions = sum(
            2 if wrap and span == side else 1
            for span, side, wrap in zip(spans[:3], sides, wraps, strict=True)
            if span > 1
        )
        hops = sum(span - 1 for span in spans[:3])
        return Link("interconnect", max(1, directions) * chip.link_bandwidth, hops * HOP_SECONDS["interconnect"])

    def members(self, axes: Sequence[str], inside_slices: bool = False) -> int:
        """Return the number of chips that a collective over these mesh axes joins."""
        return len(self._group(axes, inside_slices))

    def _group(self, axes: Sequence[str], inside_slices: bool) -> np.ndarray:
        """Return the places of the first chip and of all chips that differ from it only along these axes."""
        index = tuple(slice(None) if axis in axes else 0 for axis in MESH_AXES)
        group = self._places[index].reshape(-1, 5)
        return group[group[:, 3] == group[0, 3]] if inside_slices else group
