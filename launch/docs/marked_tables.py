"""Tables in Markdown files, each between two comments: ``<!-- NAME -->`` and ``<!-- end of NAME -->``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runtime import InputError


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with a line per row, each with as many cells as ``head``."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *lines))


def replace_table(text: str, name: str, table: str) -> str:
    """Return a document with another table between the comments of this name.

    Raises:
      InputError: the document does not have both comments.
    """
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = text.partition(start)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise InputError(f"expected the lines {start.strip()} and {end}")
    return f"{before}{start}{table}{end}{after}"
