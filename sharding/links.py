"""What a mesh axis runs over: the links between the chips of a topology, and how fast they carry a collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sharding.heads import HeadLayout
from sharding.mesh import MESH_AXES, MeshSpec, arrange_devices
from sharding.topology import Topology, places

# Time for a message to get to a neighbour, in seconds: an assumption, of the order that vendors give.
HOP_SECONDS = {"interconnect": 1e-6, "NVLink": 3e-6, "network": 10e-6}


@dataclass(frozen=True)
class Link:
    """What joins the members of a group of chips.

    Attributes:
      kind: ``interconnect`` (ICI), ``NVLink``, or ``network`` (between hosts or slices; its speed is an assumption).
      bandwidth: bytes per second that each member sends, and receives at the same time, in a collective.
      latency: seconds that a collective takes however little it carries.
    """

    kind: str
    bandwidth: float
    latency: float

    def seconds(self, kind: str, payload: float, members: int) -> float:
        """Time of one collective by the ring algorithms.

        Args:
          kind: HLO's name of it.
          payload: bytes of the whole array: what an all-gather makes, what a reduce-scatter takes.
          members: chips that take part.
        """
        share = payload * (members - 1) / members
        return (2 if kind == "all-reduce" else 1) * (share / self.bandwidth + self.latency)


@dataclass(frozen=True)
class Wiring:
    """A mesh laid over a topology."""

    topology: Topology
    spec: MeshSpec
    heads: HeadLayout

    @cached_property
    def _places(self) -> np.ndarray:
        """``[data, sequence, kv, group, (x, y, z, slice, host)]``."""
        array = arrange_devices(self.spec, self.heads, places(self.topology))
        rows = [(*place.coords, place.slice_index, place.process_index) for place in array.flat]
        return np.array(rows).reshape(*array.shape, 5)

    @property
    def slices(self) -> int:
        """TPU slices that the mesh lies over; 1 for GPUs."""
        return len(set(self._places[..., 3].flat))

    def link(self, axes: Sequence[str], inside_slices: bool = False) -> Link:
        """What joins the chips that differ along these mesh axes and no others.

        On a TPU, every torus dimension that the group spans carries its share at once, in both directions where the
        group closes a ring. Between GPUs, NVLink within a host. A group that spans GPU hosts runs as many rings at once
        as it has members on a host, each through the network card of another: together as fast as those cards, and
        never faster than NVLink, which all rings share within the host.

        Args:
          axes: of the mesh.
          inside_slices: only the chips of one slice.
        """
        chip, group = self.topology.chip, self._group(axes, inside_slices)
        if chip.platform == "gpu":
            hosts, cards = np.unique(group[:, 4], return_counts=True)
            if len(hosts) == 1:
                return Link("NVLink", chip.link_bandwidth, HOP_SECONDS["NVLink"])
            bandwidth = min(int(cards.min()) * chip.network_bandwidth, chip.link_bandwidth)
            return Link("network", bandwidth, (len(hosts) - 1) * HOP_SECONDS["network"])
        spans = [len(set(group[:, column])) for column in range(4)]
        # The network lies between slices; the interconnect joins a slice's hosts.
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
        """How many chips such a group has."""
        return len(self._group(axes, inside_slices))

    def _group(self, axes: Sequence[str], inside_slices: bool) -> np.ndarray:
        """Places of the chips that differ along these axes from the first, itself among them."""
        index = tuple(slice(None) if axis in axes else 0 for axis in MESH_AXES)
        group = self._places[index].reshape(-1, 5)
        return group[group[:, 3] == group[0, 3]] if inside_slices else group
