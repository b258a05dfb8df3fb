"""Write the table of decoding parameters from their declarations.

python -m launch.docs.parameter_table launch/README.md      replaces the text between the table's markers
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.docs.marked_tables import markdown, replace_table
from runtime import DiffusionConfig, Parameter, Requirement, SamplingConfig, declared_parameters

_CONFIGS = {"diffusion": DiffusionConfig, "autoregressive": SamplingConfig}
_HEAD = ("parameter", "models", "values", "default", "compiled in", "requires", "what it does")


def table(configs: dict[str, type] = _CONFIGS) -> str:
    """Return a Markdown table with a row for every parameter that a caller can set.

    Args:
      configs: configuration classes by kind of model; equal declarations share a row.
    """
    rows: dict[Parameter, list[str]] = {}
    for models, config in configs.items():
        for one in declared_parameters(config):
            if not one.from_model:
                rows.setdefault(one, []).append(models)
    return markdown(_HEAD, [_row(one, models, everywhere=len(models) == len(configs)) for one, models in rows.items()])


def write(text: str) -> str:
    """Return a document with its table regenerated.

    Raises:
      InputError: the document has no place for it.
    """
    return replace_table(text, "decoding parameters", table())


def _row(one: Parameter, models: Sequence[str], everywhere: bool) -> tuple[str, ...]:
    compiled = "yes" if one.compiled else "no"
    if one.variant:
        compiled = f"only whether it is `{_written(one.default)}`"
    if isinstance(one.compiled, Requirement):
        compiled = f"{f'{compiled}, ' if one.variant else ''}with {_setting(one.compiled)}"
    return (
        ", ".join(f"`{name}`" for name in (one.name, *one.aliases)),
        "all" if everywhere else ", ".join(models),
        f"{one.kind.expected}{', or None' if one.optional else ''}",
        f"`{_written(one.default)}`",
        compiled,
        "; ".join(_setting(requirement) for requirement in one.requires),
        one.help if one.exposed else f"{one.help} (in Python)",
    )


def _setting(requirement: Requirement) -> str:
    if requirement.values is None:
        return f"`{requirement.field}`"
    first, *others = requirement.values
    return " or ".join((f"`{requirement.field}={first}`", *(f"`{value}`" for value in others)))


def _written(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(write(path.read_text("utf-8")), "utf-8")
