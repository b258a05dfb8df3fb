"""Declared arrays: each field of a struct states its logical axes and dtype once.

The KV cache, the requests and the loop states are ``flax.struct`` dataclasses of such fields. Their shardings, their
abstract trees, the arrays of a single row and their per-row slices are derived from the declarations.
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
# An array. In trees that describe arrays, a leaf is a sharding or a ShapeDtypeStruct instead.
Leaf = Any


@dataclass(frozen=True)
class ArrayDeclaration:
    """The declaration of one array field.

    Attributes:
      axes: logical axes, see :class:`sharding.rules.PartitionRules`. The first is ``batch`` if each row has an entry.
      dtype: dtype of the array; None if it is chosen when the array is created.
      feature: the feature that needs the array, such as ``log_probabilities``. In programs without it, the array is
        None. Empty if all programs need the array.
      empty: value of entries to which nothing has been written.
    """

    axes: tuple[str, ...]
    dtype: Any = None
    feature: str = ""
    empty: float = 0

    @property
    def is_row(self) -> bool:
        """Whether the array has one entry per row."""
        return self.axes[:1] == ("batch",)


def array(*axes: str, dtype: Any = None, feature: str = "", empty: float = 0) -> Any:
    """Declare an array as a dataclass field; see :class:`ArrayDeclaration` for the arguments."""
    metadata = {"array": ArrayDeclaration(axes, dtype, feature, empty)}
    return flax.struct.field(metadata=metadata, default=None) if feature else flax.struct.field(metadata=metadata)


def declarations(struct: type) -> dict[str, ArrayDeclaration]:
    """Return the array declarations of a struct, by field name."""
    fields = dataclasses.fields(struct)
    return {field.name: field.metadata["array"] for field in fields if "array" in field.metadata}


def abstract(
    layout: ModelLayout,
    struct: type[Struct],
    sizes: Mapping[str, int],
    features: Collection[str] = (),
    dtype: Any = None,
) -> Struct:
    """Return a struct of ``ShapeDtypeStruct``, with shardings if the layout has a mesh.

    Args:
      layout: the model on its mesh.
      struct: the dataclass to describe.
      sizes: size of every logical axis that the dataclass uses.
      features: features of the program; the arrays of all others are None.
      dtype: dtype of arrays whose declaration has none.
    """

    def describe(one: ArrayDeclaration) -> jax.ShapeDtypeStruct:
        place = layout.sharding(*one.axes) if layout.mesh is not None else None
        chosen = dtype if one.dtype is None else one.dtype
        return jax.ShapeDtypeStruct(tuple(sizes[axis] for axis in one.axes), chosen, sharding=place)

    wanted = {"", *features}
    return struct(**{name: describe(one) for name, one in declarations(struct).items() if one.feature in wanted})


def one_row(struct: type[Struct], **values: Any) -> Struct:
    """Return a struct of host arrays for one row: each value in its declared dtype, with the row's axis in front.

    Args:
      struct: the dataclass.
      values: by field name, a number or an array without the row's axis. Optional fields may be left out or None.

    Raises:
      TypeError: a value has another kind of dtype than its declaration, such as float for an integer array.
    """
    found: dict[str, Any] = {}
    for name, declared in declarations(struct).items():
        if values.get(name) is not None:
            value = np.asarray(values.pop(name)).astype(declared.dtype, casting="same_kind", copy=False)
            found[name] = value[None] if declared.is_row else value
    return struct(**values, **found)


def shardings(layout: ModelLayout, tree: Struct) -> Struct:
    """Return the sharding of every array in a struct, nested structs included."""
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
    """Return, by field name, the arrays of a struct that have one entry per row. Fields that are None are left out."""
    declared = declarations(type(tree))
    found = {name: getattr(tree, name) for name, one in declared.items() if one.is_row}
    return {name: value for name, value in found.items() if value is not None}


def only_row_fields(tree: Struct) -> Struct:
    """Return a copy of the struct that keeps only the arrays with one entry per row; all other fields are None."""
    rows = row_fields(tree)
    return type(tree)(**{field.name: rows.get(field.name) for field in dataclasses.fields(tree)})  # type: ignore[arg-type]


def resized_row(row: Struct, like: Struct) -> Struct:
    """Resize the arrays ``[1, ...]`` of one row, to move it to slots of another shape.

    Each axis is truncated, or extended with the values of an empty row.

    Args:
      row: the row's arrays, see :func:`only_row_fields`.
      like: the same arrays of an empty row in the new slots.
    """

    def resize(values: np.ndarray, empty: np.ndarray) -> np.ndarray:
        inside = tuple(slice(0, min(sizes)) for sizes in zip(empty.shape, values.shape, strict=True))
        found = empty.copy()
        found[inside] = values[inside]
        return found

    resized: Struct = jax.tree.map(resize, row, like)
    return resized
