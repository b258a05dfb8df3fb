"""The decoding parameters that the loops read, as arrays with one value per row or as compiled settings.

Both derive from the schema: a parameter with ``in_loop`` reaches the loops under its own name.

Dimension letters: B batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from runtime.decoding.schema import Boolean, Integer, Parameter, Real, declared_parameters
from runtime.models.arrays import array

_DTYPES = {Integer: jnp.int32, Real: jnp.float32, Boolean: jnp.bool_}


def _in_loop(config: type, compiled: bool) -> list[Parameter]:
    return [one for one in declared_parameters(config) if one.in_loop and (one.compiled is True) == compiled]


def row_arrays(config: type) -> Any:
    """Return a dataclass that declares an array ``[B]`` for each run-time parameter that the loops read."""
    found = _in_loop(config, compiled=False)
    assert all(one.off is not None for one in found if one.optional), "an optional parameter has a value for None"
    fields = []
    for one in found:
        feature = "variable_length" if one.variable_length else ""
        fields.append((one.name, Any, array("batch", dtype=_DTYPES[type(one.kind)], feature=feature)))
    return dataclasses.make_dataclass(f"{config.__name__}Rows", fields, frozen=True, kw_only=True)


def row_names(config: type) -> tuple[str, ...]:
    """Return the names of the arrays of :func:`row_arrays`."""
    return tuple(one.name for one in _in_loop(config, compiled=False))


def row_values(config: Any) -> dict[str, Any]:
    """Return the values of :func:`row_arrays` for one row, by name; ``off`` replaces None.

    Parameters that are only for canvases of a variable length are None for the others.
    """
    found = {}
    for one in _in_loop(type(config), compiled=False):
        value = getattr(config, one.name)
        exists = not one.variable_length or config.variable_length
        found[one.name] = (one.off if value is None else value) if exists else None
    return found


def compiled_settings(config: type) -> Any:
    """Return a dataclass with a field for each compiled parameter that the loops read, and its default."""
    fields = [(one.name, Any, dataclasses.field(default=one.default)) for one in _in_loop(config, compiled=True)]
    return dataclasses.make_dataclass(f"{config.__name__}Settings", fields, frozen=True, kw_only=True)


def setting_values(config: Any) -> dict[str, Any]:
    """Return the values of :func:`compiled_settings` for a request, by name."""
    return {one.name: getattr(config, one.name) for one in _in_loop(type(config), compiled=True)}
