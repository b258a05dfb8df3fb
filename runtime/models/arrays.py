"""Declared arrays: a field of a struct says its logical axes and dtype once, and the rest is derived from that.

The key-value cache, the requests and the state of decoding loops are ``flax.struct`` dataclasses of such fields. Their
shardings, their abstract trees and what belongs to one row all follow from the declarations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import flax.struct
import jax
import numpy as np

from runtime.models.declarations import ModelLayout

Struct = TypeVar("Struct")
# An array, or in its place a sharding or an abstract shape, in trees that describe one.
Leaf = Any


@dataclass(frozen=True)
class ArrayDeclaration:
    """What one field declares.

    Attributes:
      axes: logical axes, see :class:`sharding.rules.PartitionRules`; ``batch`` first where each row has an entry.
      dtype: None where it is decided when the array is made.
    """

    axes: tuple[str, ...]
    dtype: Any = None

    @property
    def is_row(self) -> bool:
        """Whether each row has an entry."""
        return self.axes[:1] == ("batch",)


def array(*axes: str, dtype: Any = None, optional: bool = False) -> Any:
    """Declare an array as a dataclass field; an ``optional`` one is None in programs that do not need it."""
    metadata = {"array": ArrayDeclaration(axes, dtype)}
    return flax.struct.field(metadata=metadata, default=None) if optional else flax.struct.field(metadata=metadata)


def declarations(struct: type) -> dict[str, ArrayDeclaration]:
    """The declared arrays of a struct, by field."""
    fields = dataclasses.fields(struct)
    return {field.name: field.metadata["array"] for field in fields if "array" in field.metadata}


def abstract(
    layout: ModelLayout, struct: type[Struct], sizes: Mapping[str, int], omit: Collection[str] = (), dtype: Any = None
) -> Struct:
    """A struct of ``ShapeDtypeStruct``, with shardings where the layout has a mesh.

    Args:
      layout: the model on its mesh.
      struct: the dataclass.
      sizes: size of every logical axis that it names.
      omit: fields that stay None.
      dtype: of arrays that declare none.
    """

    def describe(one: ArrayDeclaration) -> jax.ShapeDtypeStruct:
        place = layout.sharding(*one.axes) if layout.mesh is not None else None
        chosen = dtype if one.dtype is None else one.dtype
        return jax.ShapeDtypeStruct(tuple(sizes[axis] for axis in one.axes), chosen, sharding=place)

    declared = declarations(struct)
    return struct(**{name: None if name in omit else describe(one) for name, one in declared.items()})


def shardings(layout: ModelLayout, tree: Struct) -> Struct:
    """The sharding of every array that a struct has, structs within it included."""
    found: dict[str, Any] = {}
    declared = declarations(type(tree))
    for field in dataclasses.fields(tree):  # type: ignore[arg-type]
        value = getattr(tree, field.name)
        if value is None:
            found[field.name] = None
        elif field.name in declared:
            found[field.name] = layout.sharding(*declared[field.name].axes)
        elif isinstance(value, tuple):
            found[field.name] = tuple(shardings(layout, one) for one in value)
        else:
            found[field.name] = shardings(layout, value)
    return type(tree)(**found)


def row_fields(tree: Any) -> dict[str, Any]:
    """The arrays of a struct that have an entry for each row, by field; those that are None are left out."""
    declared = declarations(type(tree))
    found = {name: getattr(tree, name) for name, one in declared.items() if one.is_row}
    return {name: value for name, value in found.items() if value is not None}


def rows_alone(tree: Struct) -> Struct:
    """The struct with nothing but the arrays that have an entry for each row."""
    rows = row_fields(tree)
    return type(tree)(**{field.name: rows.get(field.name) for field in dataclasses.fields(tree)})  # type: ignore[arg-type]


def resized_row(values: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One row's arrays ``[1, ...]`` in the sizes that they have elsewhere.

    A row leaves slots of one shape for slots of another so: every axis is cut, or goes on as an empty row there does.

    Args:
      values: of the row, by field, see :func:`row_fields`.
      like: of an empty row in the new place, by the same fields.
    """
    found = {}
    for name, own in like.items():
        inside = tuple(slice(0, min(sizes)) for sizes in zip(own.shape, values[name].shape, strict=True))
        found[name] = own.copy()
        found[name][inside] = values[name][inside]
    return found
