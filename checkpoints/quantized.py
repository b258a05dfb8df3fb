"""Tensors that are quantized while they are read: int8 with a float32 scale per output channel, as on the devices."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from checkpoints.non_finite import NonFinite
from checkpoints.source import Index, StoredTensor, StoredTensors
from runtime.models.declarations import ModelLayout
from runtime.models.quantization import int8_scales, int8_values


@dataclass(frozen=True)
class _Quantized:
    """A matrix that is quantized when it is read. To compute the scales, it is read once more.

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


def quantized_tensors(found: StoredTensors, layout: ModelLayout, wrong: NonFinite) -> StoredTensors:
    """Return a checkpoint's tensors, quantized as a layout says: matrices as integers, and their scales as tensors.

    Integers and scales equal those of :func:`runtime.models.quantization.quantize` on the devices. ``wrong`` counts NaN
    and infinity in the matrices when their scales are computed.
    """
    by_name = dict(found.by_name)
    for leaf in layout.leaves:
        if not leaf.quantized:
            continue
        for source, scales in zip(leaf.sources, leaf.scales.sources, strict=True):
            one = _Quantized(found[source], source, leaf.contracted_dimensions, wrong)
            shape, rows = found[source].shape, found[source].rows
            by_name[source] = [StoredTensor(source, shape, "int8", one.read_values, rows)]
            by_name[scales] = [StoredTensor(scales, leaf.scales.source_shape, "float32", one.read_scales)]
    return StoredTensors(by_name, found.claims, found.bytes_read)
