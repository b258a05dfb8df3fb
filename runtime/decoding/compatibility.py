"""Which requests a compiled program can run: the compiled values of decoding parameters, and their comparison."""

from __future__ import annotations

from typing import Any

from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.decoding.schema import declared_parameters


def compiled_values(config: DiffusionConfig | SamplingConfig) -> dict[str, Any]:
    """Return, by name, the values that are compiled into the program.

    Requests can share slots only if these values are equal. Every other parameter is a run-time argument of each row.
    """
    return {
        one.name: one.off if (value := getattr(config, one.name)) is None else value
        for one in declared_parameters(type(config))
        if one.is_compiled(config) and not one.from_model
    }


def can_run(compiled: DiffusionConfig | SamplingConfig, asked: DiffusionConfig | SamplingConfig) -> bool:
    """Return whether programs compiled for one configuration can also run another."""
    theirs, wanted = compiled_values(compiled), compiled_values(asked)
    for one in declared_parameters(type(asked)):
        if one.variant:
            has, needs = (values.pop(one.name, one.default) != one.default for values in (theirs, wanted))
            if needs and not has:
                return False
    return type(compiled) is type(asked) and theirs == wanted
