"""Tensors that are quantized while they are read: integers and float32 scales, as on the devices."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from checkpoints.non_finite import NonFinite
from checkpoints.source import Index, StoredTensor, StoredTensors
from runtime.models.declarations import ModelLayout
from runtime.models.quantization import VALUES_PER_BYTE, int4_scales, int8_scales, int8_values, pack_int4


@dataclass(frozen=True)
class _Quantized:
    """A matrix that is quantized to int8 when it is read. To compute the scales, it is read once more.

    Attributes:
      tensor: the matrix.
      name: its name.
      contracted: the dimensions that a product with the matrix contracts; elements along them share a scale.
      wrong: counts NaN and infinity in the matrix, because they make scales non-finite and integers meaningless.
    """

    tensor: StoredTensor
    name: str
    contracted: tuple[int, ...]
    wrong: NonFinite

    @functools.cached_property
    def scales(self) -> np.ndarray:
        kept = tuple(place for place in range(len(self.tensor.shape)) if place not in self.contracted)
        largest = np.zeros([self.tensor.shape[place] for place in kept], np.float32)
        for part in self.tensor.parts():
            data = self.tensor.read(part)
            self.wrong.count(self.name, data)
            found = np.abs(data.astype(np.float32)).max(axis=self.contracted)
            where = tuple(part[place] for place in kept)
            largest[where] = np.maximum(largest[where], found)
        return np.asarray(int8_scales(largest))

    def read_scales(self, index: Index) -> np.ndarray:
        return self.scales[index]

    def read_values(self, index: Index) -> np.ndarray:
        kept = tuple(part for place, part in enumerate(index) if place not in self.contracted)
        scales = np.expand_dims(self.scales[kept], self.contracted)
        wide = self.tensor.read(index).astype(np.float32)
        with np.errstate(invalid="ignore"):  # NaN and infinity were counted with the scales
            return np.asarray(int8_values(wide, scales))


@dataclass(frozen=True)
class _Grouped:
    """A matrix that is quantized to int4 when it is read, two integers per byte. For the scales, it is read once more.

    Attributes:
      tensor, name, wrong: as for int8.
      axis: the dimension of groups.
      group: number of elements along it that share a scale.
    """

    tensor: StoredTensor
    name: str
    axis: int
    group: int
    wrong: NonFinite

    def _in_groups(self, data: np.ndarray) -> np.ndarray:
        """Split the dimension of groups: ``[..., size, ...]`` -> ``[..., groups, group, ...]``."""
        return data.reshape(*data.shape[: self.axis], -1, self.group, *data.shape[self.axis + 1 :])

    def _times(self, index: Index, count: int, step: int = 1) -> Index:
        """Return a part with its range along the dimension of groups multiplied, and widened to multiples of ``step``.

        No range exceeds the tensor's.
        """
        own, size = index[self.axis], self.tensor.shape[self.axis]
        stop = min(-(-own.stop * count // step) * step, size)
        changed = slice(own.start * count // step * step, stop)
        return (*index[: self.axis], changed, *index[self.axis + 1 :])

    @functools.cached_property
    def scales(self) -> np.ndarray:
        shape = [size // self.group if place == self.axis else size for place, size in enumerate(self.tensor.shape)]
        found = np.empty(shape, np.float32)
        for part in self.tensor.parts(self.group if self.axis == 0 else 1):
            data = self.tensor.read(part)
            self.wrong.count(self.name, data)
            own = part[self.axis]
            groups = slice(own.start // self.group, own.stop // self.group)
            place = (*part[: self.axis], groups, *part[self.axis + 1 :])
            found[place] = int4_scales(self._in_groups(np.abs(data.astype(np.float32))).max(axis=self.axis + 1))
        return found

    def read_scales(self, index: Index) -> np.ndarray:
        return self.scales[index]

    def read_values(self, index: Index) -> np.ndarray:
        wanted = self._times(index, VALUES_PER_BYTE)
        whole = self._times(index, VALUES_PER_BYTE, self.group)
        first, low = whole[self.axis].start, wanted[self.axis].start
        groups = slice(first // self.group, whole[self.axis].stop // self.group)
        scales = self.scales[(*index[: self.axis], groups, *index[self.axis + 1 :])]
        wide = self._in_groups(self.tensor.read(whole).astype(np.float32))
        with np.errstate(invalid="ignore"):  # NaN and infinity were counted with the scales
            values = np.asarray(int8_values(wide, np.expand_dims(scales, self.axis + 1)))
        values = values.reshape([part.stop - part.start for part in whole])
        own = slice(low - first, wanted[self.axis].stop - first)
        return pack_int4(values[(slice(None),) * self.axis + (own,)], self.axis)


def quantized_tensors(found: StoredTensors, layout: ModelLayout, wrong: NonFinite) -> StoredTensors:
    """Return a checkpoint's tensors, quantized as a layout says: matrices as integers, and their scales as tensors.

    Integers and scales equal those of :func:`runtime.models.quantization.quantize` on the devices. ``wrong`` counts NaN
    and infinity in the matrices when their scales are computed.
    """
    by_name = dict(found.by_name)
    for leaf in layout.leaves:
        if not leaf.quantized:
            continue
        values, scales = leaf.stored
        for source, name in zip(leaf.sources, scales.sources, strict=True):
            tensor, contracted, rows = found[source], leaf.contracted_dimensions, found[source].rows
            one: _Quantized | _Grouped
            if leaf.group is None:
                one = _Quantized(tensor, source, contracted, wrong)
            else:
                one = _Grouped(tensor, source, contracted[-1], leaf.group, wrong)
                rows = max(1, rows // VALUES_PER_BYTE)
            by_name[source] = [StoredTensor(source, values.source_shape, values.integers, one.read_values, rows)]
            by_name[name] = [StoredTensor(name, scales.source_shape, "float32", one.read_scales)]
    return StoredTensors(by_name, found.claims, found.bytes_read)
