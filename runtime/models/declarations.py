"""Weight declarations, and the layout of a model on a mesh that is derived from them.

A model's weights are ``flax.struct`` dataclasses. Each field declares a weight once: its logical axes, its initializer,
and its source tensor in a Hugging Face checkpoint. Everything else is derived from these fields: shapes, shardings, the
abstract tree, random weights, the parameter count, the memory table, and loading.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runtime.models.config import ModelConfig
from runtime.models.costs import LayerCost
from runtime.models.leaves import WeightLeaf, int4_group
from runtime.models.quantization import QUANTIZATIONS, Quantized, quantize, unpack_int4
from sharding.errors import InputError
from sharding.heads import HeadLayout
from sharding.mesh import MeshSpec, build_mesh
from sharding.rules import PartitionRules
from sharding.validate import NamedShape, check_mesh, working_tensor_sizes

# The vocabulary is padded to a multiple of this number, so that it splits into this many equal blocks, none of which
# crosses a shard boundary. Sums over the vocabulary are computed block by block.
VOCAB_BLOCKS = 128


@dataclass(frozen=True)
class WeightDeclaration:
    """The declaration of one weight.

    Attributes:
      axes: logical axes, without ``layers``.
      source: name of the tensor in a Hugging Face checkpoint; ``{layer}`` is replaced by the layer's number.
      source_axes: for each dimension of the source tensor, the logical axes that it merges, major first.
      initializer: ``normal``, ``ones`` or ``zeros``.
      contracted: axes that a matrix product with the weight sums over. Empty for weights that are not matrices; these
        are never quantized.
    """

    axes: tuple[str, ...]
    source: str
    source_axes: tuple[tuple[str, ...], ...]
    initializer: str
    contracted: tuple[str, ...]


def weight(
    *axes: str,
    source: str,
    source_axes: tuple[tuple[str, ...], ...] | None = None,
    init: str = "normal",
    contracted: tuple[str, ...] = (),
) -> Any:
    """Declare a weight as a dataclass field. By default, the source tensor has the same axes in the same order."""
    if source_axes is None:
        source_axes = tuple((axis,) for axis in axes)
    return flax.struct.field(metadata={"weight": WeightDeclaration(axes, source, source_axes, init, contracted)})


def layers_of(layer_class: type) -> Any:
    """Declare the field that holds the layers, either stacked or as a tuple; see :attr:`ModelLayout.scan_layers`."""
    return flax.struct.field(metadata={"layers": layer_class})


def scans_layers(platform: str) -> bool:
    """Return whether programs for this platform scan over stacked layers.

    The TPU compiler reads a layer directly from the stack. The compilers for GPU and CPU would copy it out first.
    """
    return platform == "tpu"


def _fields(weights_class: type) -> Iterator[tuple[str, WeightDeclaration, str]]:
    """Yield every weight's name, its declaration, and the name of the layers field that it is in (empty if none)."""
    for field in dataclasses.fields(weights_class):
        if "layers" in field.metadata:
            for name, declaration, _ in _fields(field.metadata["layers"]):
                yield name, declaration, field.name
        else:
            yield field.name, field.metadata["weight"], ""


@dataclass(frozen=True)
class ModelLayout:
    """The layout of a model on a mesh: shape and sharding of every weight.

    Attributes:
      config: the model's configuration.
      weights_class: the dataclass that declares the weights.
      spec: sizes of the mesh axes.
      heads: how attention heads are divided over the tensor axis.
      rules: maps logical axes to mesh axes.
      mesh: the mesh; None for a layout that is used only for counts and tables, and never compiled.
      quantization: ``none``, ``int8`` or ``int4``; see :func:`integers_of`.
      scan_layers: whether layers are stacked on a leading axis and scanned, instead of a tuple that programs loop over.
    """

    config: ModelConfig
    weights_class: type[Any]
    spec: MeshSpec
    heads: HeadLayout
    rules: PartitionRules
    mesh: Mesh | None
    quantization: str = "none"
    scan_layers: bool = True

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        weights_class: type[Any],
        spec: MeshSpec | None = None,
        devices: Any = None,
        quantization: str = "none",
        scan_layers: bool | None = None,
    ) -> ModelLayout:
        """Check that the model can be divided over the mesh, and create the layout.

        Args:
          config: the model's configuration.
          weights_class: the dataclass that declares its weights.
          spec: sizes of the mesh axes; a single device by default. ``data`` or ``sequence`` may be -1 until :meth:`on`.
          devices: devices of the mesh, attached or of an AOT topology; None for a layout of counts and tables only.
          quantization: ``none``, or ``int8`` or ``int4`` to keep matrices as
            :class:`runtime.models.quantization.Quantized`.
          scan_layers: whether to stack and scan layers; by default, :func:`scans_layers` decides if there are devices.

        Raises:
          InputError: the quantization is unknown.
          MeshError: see :func:`sharding.validate.check_mesh` and :func:`sharding.mesh.build_mesh`; or int4 weights that
            share a scale would be on several devices.
        """
        if quantization not in QUANTIZATIONS:
            raise InputError(f"quantization {quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
        resolved = spec or MeshSpec()
        check_mesh(named_shapes(config, weights_class), resolved, config.num_heads, config.num_kv_heads)
        if quantization == "int4":
            shapes = named_shapes(config, weights_class, quantization)
            check_mesh(shapes, resolved, config.num_heads, config.num_kv_heads, "; int8 works on this mesh too")
        heads = HeadLayout.for_tensor(config.num_heads, config.num_kv_heads, resolved.tensor)
        rules = PartitionRules.for_heads(heads)
        layout = cls(config, weights_class, resolved, heads, rules, None, quantization, scan_layers is not False)
        return layout if devices is None else layout.on(devices, scan_layers)

    def on(self, devices: Any, scan_layers: bool | None = None) -> ModelLayout:
        """Return this layout on a mesh of devices, with an axis of size -1 resolved; see :meth:`create` for errors."""
        spec = self.spec.resolve(len(devices))
        mesh = build_mesh(spec, self.heads, devices)
        scan_layers = scans_layers(mesh.devices.flat[0].platform) if scan_layers is None else scan_layers
        return replace(self, spec=spec, mesh=mesh, scan_layers=scan_layers)

    @property
    def padded_vocab(self) -> int:
        """Vocabulary size on the devices: padded to a multiple of ``VOCAB_BLOCKS`` and of the tensor axis."""
        multiple = math.lcm(VOCAB_BLOCKS, self.spec.tensor)
        return math.ceil(self.config.vocab_size / multiple) * multiple

    @property
    def padded_dimensions(self) -> dict[str, int]:
        """Padded size of every logical axis, as on the devices."""
        padded = {"queries_per_kv": self.heads.padded_queries_per_kv, "vocab": self.padded_vocab}
        return self.config.dimensions | padded

    @property
    def mesh_axis_sizes(self) -> dict[str, int]:
        """Size of every axis of the mesh, with the tensor axis as its two parts ``kv`` and ``group``."""
        heads, spec = self.heads, self.spec
        return {"data": spec.data, "sequence": spec.sequence, "kv": heads.kv, "group": heads.group}

    def size_per_device(self, axis: str) -> int:
        """Return the size of one device's shard of a logical axis of the weights, padding included."""
        return self.padded_dimensions[axis] // self.rules.shards(axis, self.mesh_axis_sizes)

    @property
    def query_heads_per_device(self) -> int:
        """Number of query heads on each device, padding included."""
        return self.size_per_device("kv_heads") * self.size_per_device("queries_per_kv")

    @cached_property
    def layer_cost(self) -> LayerCost:
        """Cost of one layer on one device, as the weights class states it."""
        cost: LayerCost = self.weights_class.cost(self)
        return cost

    @property
    def embedding(self) -> WeightLeaf:
        """The token embedding: the first weight with a ``vocab`` axis."""
        return next(leaf for leaf in self.leaves if "vocab" in leaf.axes)

    @property
    def head(self) -> WeightLeaf:
        """The output head: the last weight with a ``vocab`` axis. If tied, this is the embedding."""
        return next(leaf for leaf in reversed(self.leaves) if "vocab" in leaf.axes)

    @cached_property
    def leaves(self) -> list[WeightLeaf]:
        """All leaves of the weights, in the order of the pytree."""
        layers = tuple(range(self.config.num_layers))
        found: list[WeightLeaf] = []
        declared = enumerate(_fields(self.weights_class))
        for holder, fields in itertools.groupby(declared, key=lambda field: field[1][2]):
            if not holder:
                parts: dict[str, tuple[int, ...]] = {"": ()}
            elif self.scan_layers:
                parts = {f"{holder}.": layers}
            else:
                parts = {f"{holder}.{layer}.": (layer,) for layer in layers}
            names = [(number, name, declaration) for number, (name, declaration, _) in fields]
            for prefix, held in parts.items():
                found += [self._leaf(prefix + name, number, declaration, held) for number, name, declaration in names]
        return found

    def _leaf(self, name: str, number: int, declaration: WeightDeclaration, layers: tuple[int, ...]) -> WeightLeaf:
        sizes, padded = self.config.dimensions, self.padded_dimensions
        axes = ("layers", *declaration.axes) if layers and self.scan_layers else declaration.axes
        return WeightLeaf(
            name=name,
            number=number,
            layers=layers,
            axes=axes,
            shape=tuple(sizes[axis] for axis in axes),
            padded_shape=tuple(padded[axis] for axis in axes),
            sources=tuple(declaration.source.format(layer=layer) for layer in layers or (0,)),
            source_axes=declaration.source_axes,
            source_shape=tuple(math.prod(sizes[axis] for axis in merge) for merge in declaration.source_axes),
            initializer=declaration.initializer,
            contracted=declaration.contracted,
            integers=integers_of(self.quantization, declaration, sizes),
        )

    @property
    def stored_leaves(self) -> list[WeightLeaf]:
        """All leaves that a checkpoint of this quantization stores. Scales are stored as separate leaves."""
        return [part for leaf in self.leaves for part in leaf.stored]

    def sharding(self, *dimensions: str | tuple[str, ...] | None) -> NamedSharding:
        """Return the sharding of an array with these logical dimensions on the layout's mesh."""
        assert self.mesh is not None, "a layout without a mesh has no shardings"
        return NamedSharding(self.mesh, self.rules.spec(*dimensions))

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of an array that is replicated on every device."""
        return self.sharding()

    def build(self, make: Callable[[WeightLeaf], Any]) -> Any:
        """Build the weights pytree with ``make(leaf)`` as the value of every leaf."""
        values = {leaf.name: make(leaf) for leaf in self.leaves}

        def assemble(weights_class: type, prefix: str) -> Any:
            return weights_class(**{field.name: value(field, prefix) for field in dataclasses.fields(weights_class)})

        def value(field: dataclasses.Field[Any], prefix: str) -> Any:
            name, layer_class = prefix + field.name, field.metadata.get("layers")
            if layer_class is None:
                return values[name]
            if self.scan_layers:
                return assemble(layer_class, f"{name}.")
            return tuple(assemble(layer_class, f"{name}.{layer}.") for layer in range(self.config.num_layers))

        return assemble(self.weights_class, "")

    def named(self, weights: Any) -> dict[str, Any]:
        """Return the leaves of a weights pytree by name.

        Raises:
          AttributeError, IndexError, TypeError: the tree does not have this layout's structure.
        """

        def part(name: str) -> Any:
            value = weights
            for field in name.split("."):
                value = value[int(field)] if field.isdigit() else getattr(value, field)
            return value

        return {leaf.name: part(leaf.name) for leaf in self.leaves}

    def layer(self, weights: Any, number: int) -> Any:
        """Return the weights of one layer; a copy if the layers are stacked."""
        if self.scan_layers:
            return jax.tree.map(lambda stack: stack[number], weights.layers)
        return weights.layers[number]

    def abstract_weights(self, dtype: Any) -> Any:
        """Return the weights pytree as ``ShapeDtypeStruct``, with shardings if the layout has a mesh."""

        def struct(leaf: WeightLeaf, dtype: Any) -> jax.ShapeDtypeStruct:
            sharding = self.sharding(*leaf.axes) if self.mesh is not None else None
            return jax.ShapeDtypeStruct(leaf.padded_shape, dtype, sharding=sharding)

        def make(leaf: WeightLeaf) -> Any:
            if not leaf.quantized:
                return struct(leaf, dtype)
            return Quantized(struct(leaf, self._held(leaf)), struct(leaf.scales, jnp.float32))

        return self.build(make)

    def quantizer(self, leaf: WeightLeaf, layered: bool = True) -> Callable[[jax.Array], Any]:
        """Return the function that quantizes a leaf's array on the mesh, or the identity for a leaf in full precision.

        Args:
          leaf: the leaf.
          layered: whether the array has the leading ``layers`` axis of a stacked leaf.
        """
        if not leaf.quantized:
            return lambda array: array
        axes, shardings = self._of_quantized(leaf, layered)
        contracted = tuple(place for place, axis in enumerate(axes) if axis in leaf.contracted)
        return _quantizer(contracted, leaf.group, leaf.is_stacked and layered, self._held(leaf), shardings)

    def unpacker(self, leaf: WeightLeaf) -> Callable[[jax.Array, jax.Array], Quantized]:
        """Return the function that joins what a checkpoint stores of a layer of a quantized leaf, on the mesh."""
        if leaf.integers != "int4":
            return Quantized
        axes, shardings = self._of_quantized(leaf, layered=False)
        return _unpacker(axes.index(leaf.contracted[-1]), self._held(leaf), shardings)

    def _held(self, leaf: WeightLeaf) -> Any:
        """Return the dtype of a quantized leaf's integers on the devices."""
        # On CPU, programs that JAX compiles ahead of time refuse int4 arrays: it reports other layouts for the arrays
        # than for the programs.
        on_cpu = self.mesh is not None and self.mesh.devices.flat[0].platform == "cpu"
        return jnp.dtype(jnp.int8 if on_cpu else leaf.integers)

    def _of_quantized(self, leaf: WeightLeaf, layered: bool) -> tuple[tuple[str, ...], Quantized]:
        """Return the axes of a quantized leaf's integers, and the shardings of its integers and scales."""
        skip = 1 if leaf.is_stacked and not layered else 0
        axes, scales = leaf.axes[skip:], leaf.scale_axes[skip:]
        return axes, Quantized(self.sharding(*axes), self.sharding(*scales))

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the model, unpadded."""
        return sum(math.prod(leaf.shape) for leaf in self.leaves)

    def bytes_per_device(self, dtype: Any) -> int:
        """Return the bytes of weights on each device, padding and replication included."""
        return sum(self.leaf_bytes_per_device(leaf, dtype) for leaf in self.leaves)

    def bytes_read_per_pass(self, dtype: Any) -> int:
        """Return the bytes of weights that a forward pass reads on each device.

        An untied embedding is not counted, because only a few of its rows are read.
        """
        total, embedding = self.bytes_per_device(dtype), self.embedding
        if embedding.name == self.head.name:
            return total
        # The scales of a quantized embedding, one per token, are still counted.
        item = 1 if embedding.quantized else jnp.dtype(dtype).itemsize
        return total - math.prod(shard_shape(embedding, self)) * item

    def leaf_bytes_per_device(self, leaf: WeightLeaf, dtype: Any) -> int:
        """Return the bytes of one leaf on each device; for a quantized leaf, of its integers and float32 scales."""
        count = math.prod(shard_shape(leaf, self))
        if leaf.quantized:
            return count * jnp.iinfo(self._held(leaf)).bits // 8 + 4 * math.prod(shard_shape(leaf.scales, self))
        return count * jnp.dtype(dtype).itemsize


# Cached, so that the layers of a model share one program.
@functools.lru_cache(256)
def _quantizer(
    contracted: tuple[int, ...], group: int | None, is_stacked: bool, dtype: Any, shardings: Quantized
) -> Callable[[jax.Array], Quantized]:
    function = partial(quantize, contracted=contracted, group=group, is_stacked=is_stacked, dtype=dtype)
    return jax.jit(function, out_shardings=shardings)


@functools.lru_cache(256)
def _unpacker(axis: int, dtype: Any, shardings: Quantized) -> Callable[[jax.Array, jax.Array], Quantized]:
    def unpacked(packed: jax.Array, scales: jax.Array) -> Quantized:
        return Quantized(unpack_int4(packed, axis).astype(dtype), scales)

    return jax.jit(unpacked, out_shardings=shardings)


def integers_of(quantization: str, declaration: WeightDeclaration, sizes: Mapping[str, int]) -> str:
    """Return the dtype of the integers that a quantization keeps a weight as; empty for full precision.

    Embeddings and heads have one scale per token, so with ``int4`` they are int8, as are matrices that
    :func:`runtime.models.leaves.int4_group` has no group for. ``sizes`` are unpadded sizes of logical axes.
    """
    if quantization == "none" or not declaration.contracted:
        return ""
    last = declaration.contracted[-1]
    if quantization == "int8" or "vocab" in declaration.axes or int4_group(last, sizes[last]) is None:
        return "int8"
    return quantization


def named_shapes(config: ModelConfig, weights_class: type, quantization: str = "none") -> list[NamedShape]:
    """Return name, axes and unpadded sizes of every weight, for the validation of a mesh.

    Of an int4 weight, groups are counted instead of weights, because a group is on one device.
    """
    sizes, found = config.dimensions, []
    for _, declaration, _ in _fields(weights_class):
        own = {axis: sizes[axis] for axis in declaration.axes}
        source = declaration.source
        if integers_of(quantization, declaration, sizes) == "int4":
            last = declaration.contracted[-1]
            group = int4_group(last, sizes[last]) or 1
            own[last] //= group
            source += f" in groups of {group} int4 weights"
        found.append(NamedShape(source, declaration.axes, tuple(own.values())))
    return found


def tensor_sizes(config: ModelConfig, weights_class: type, limit: int, quantization: str = "none") -> list[int]:
    """Return the tensor axis sizes up to ``limit`` that the model can be divided by, in ascending order."""
    shapes = named_shapes(config, weights_class, quantization)
    return working_tensor_sizes(shapes, limit, config.num_heads, config.num_kv_heads)


def shard_shape(leaf: WeightLeaf, layout: ModelLayout) -> tuple[int, ...]:
    """Return the shape of one device's shard of a weight, padding included."""
    sizes = layout.mesh_axis_sizes
    return tuple(
        size // layout.rules.shards(axis, sizes) for axis, size in zip(leaf.axes, leaf.padded_shape, strict=True)
    )


def partition_spec(leaf: WeightLeaf, layout: ModelLayout) -> PartitionSpec:
    """Return the partition spec of a weight."""
    return layout.rules.spec(*leaf.axes)
