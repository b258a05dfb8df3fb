"""Write the API reference from the docstrings of the public classes.

python -m launch.docs.api_reference launch/docs/api.md
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime import (
    Completion,
    DiffusionConfig,
    DraftStats,
    Engine,
    GenerationResult,
    GenerationStats,
    MeshSpec,
    RowRequest,
    SamplingConfig,
    declared_parameters,
)

CLASSES = (
    Engine,
    DiffusionConfig,
    SamplingConfig,
    Completion,
    GenerationResult,
    GenerationStats,
    DraftStats,
    RowRequest,
    MeshSpec,
)
_SECTION = re.compile(r"(?m)^(Args|Returns|Yields|Raises|Attributes|Example):$")


def reference() -> str:
    """Return the document: a section for each class, with its public members in the order of their definition."""
    parts = [
        "# API reference\n\n"
        "Generated from docstrings by `python -m launch.docs.api_reference launch/docs/api.md`. Every name can be "
        "imported from `diffumesh`.\n"
    ]
    parts += [part for found in CLASSES for part in _class(found)]
    return "\n".join(parts)


def _class(found: type) -> Iterator[str]:
    yield f"## {found.__name__}\n\n{_prose(found.__doc__)}"
    if found in (DiffusionConfig, SamplingConfig):
        yield "| field | default | meaning |\n|---|---|---|\n" + "".join(
            f"| `{one.name}` | `{one.default!r}` | {one.help} |\n"
            for one in declared_parameters(found)
            if not one.from_model
        )
    elif dataclasses.is_dataclass(found):
        fields = [(one.name, str(one.type)) for one in dataclasses.fields(found)]
        yield "Fields: " + ", ".join(f"`{name}: {kind}`" for name, kind in fields) + ".\n"
    for name, member in _members(found):
        if isinstance(member, property):
            yield f"### `{name}` (property)\n\n{_prose(member.__doc__)}"
            continue
        bound = isinstance(member, (classmethod, staticmethod))
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        signature = inspect.signature(function)
        own = [one for key, one in signature.parameters.items() if key not in ("self", "cls")]
        own = [one.replace(annotation=_unquoted(one.annotation)) for one in own]
        text = str(signature.replace(parameters=own, return_annotation=_unquoted(signature.return_annotation)))
        prefix = f"{found.__name__}." if bound else ""
        yield f"### `{prefix}{name}`\n\n```python\n{prefix}{name}{_wrapped(text)}\n```\n\n{_prose(function.__doc__)}"


class _Unquoted(str):
    """An annotation as it is written in the code."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _unquoted(annotation: Any) -> Any:
    """Return an annotation that a signature shows without quotes."""
    return _Unquoted(annotation) if isinstance(annotation, str) else annotation


def _members(found: type) -> Iterator[tuple[str, Any]]:
    """Yield names and objects of public methods and properties that have a docstring, base classes first."""
    seen = {}
    for base in reversed(found.__mro__[:-1]):
        for name, member in vars(base).items():
            function = getattr(member, "__func__", member)
            wanted = isinstance(member, property) or inspect.isfunction(function)
            if wanted and not name.startswith("_") and inspect.getdoc(member):
                seen[name] = member
    yield from seen.items()


def _wrapped(signature: str) -> str:
    """Return a signature, with one parameter per line if it is long."""
    if len(signature) < 90:
        return signature
    inside, _, returned = signature[1:].rpartition(")")
    parts = re.split(r", (?![^\[(]*[\])])", inside)
    return "(\n" + "".join(f"    {part},\n" for part in parts) + f"){returned}"


def _prose(docstring: str | None) -> str:
    """Convert a docstring in Google style to Markdown."""
    text = inspect.cleandoc(docstring or "")
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    lines, section = [], ""
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            lines += [f"**{heading[1]}**", ""]
            section = heading[1]
        elif section in ("Returns", "Yields") and line.startswith("  ") and lines[-1]:
            lines.append(f"  {line.strip()}")  # one text of several lines
        elif section and re.match(r"  \S", line):
            name, colon, meaning = line.strip().partition(": ")
            lines.append(
                f"- `{name}`: {meaning}" if colon and " " not in name.replace(", ", "") else f"- {line.strip()}"
            )
        elif section and line.startswith("    "):
            lines.append(f"  {line.strip()}")
        else:
            section = "" if line else section
            lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), "utf-8")
