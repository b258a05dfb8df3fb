"""`--history_html`: the finished text as a page, each token coloured by the step that set it.

The page is one file: it asks nothing of the network, and a slider (or ``#step=12`` in its address) goes back to any
step. ``history.html`` beside this module is its template.
"""

from __future__ import annotations

import html
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.display.pages import content_security_policy, page_template


@dataclass(frozen=True)
class HistoryToken:
    """One position of a finished canvas.

    Attributes:
      text: what the token says; any text, since the page shows it and never interprets it.
      step: the step that set it, counted from 0 as in ``GenerationResult.commit_steps``; -1 where it was given in the
        prompt, None where it is still masked.
      end: it belongs to what follows the end of the text (the end token and its repetitions), which the page folds
        into one button.
    """

    text: str
    step: int | None
    end: bool = False


@dataclass(frozen=True)
class HistoryRow:
    """One row of a batch.

    Attributes:
      title: the row's heading.
      tokens: the canvas from its first real position to its last, prompt included.
      steps: denoise steps that were asked for; every token's step is less.
    """

    title: str
    tokens: Sequence[HistoryToken]
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"row {self.title!r}: steps is {self.steps}; it must be at least 1")
        for position, token in enumerate(self.tokens):
            if token.step is not None and not -1 <= token.step < self.steps:
                raise ValueError(
                    f"row {self.title!r}, position {position}: step is {token.step}; expected -1 to {self.steps - 1}"
                )


def render_history_html(rows: Sequence[HistoryRow], *, title: str, settings: Mapping[str, str]) -> str:
    """The page as text.

    Args:
      rows: the rows of the batch, which share the slider.
      title: the page's heading.
      settings: names and values to show below it.

    Returns:
      A complete HTML document in ASCII characters, but for the template's own.
    """
    template = page_template("launch.display", "history.html")
    content = {
        "title": title,
        "settings": list(settings.items()),
        "rows": [
            {
                "title": row.title,
                "steps": row.steps,
                "tokens": [(token.text, token.step, int(token.end)) for token in row.tokens],
            }
            for row in rows
        ],
    }
    # A script element ends at the first "</script", whatever it holds, so no "<" may stand in the data.
    data = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")
    parts = {
        "title": html.escape(title.encode("utf-8", "replace").decode("utf-8")),
        "data": data,
        "policy": content_security_policy(template),
    }
    # In one pass: a title that says {{data}} stays what it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def write_history_html(
    path: str | os.PathLike[str], rows: Sequence[HistoryRow], *, title: str, settings: Mapping[str, str]
) -> None:
    """Write the page; a file that was there is replaced whole, or left as it was.

    Args:
      path: the file, in a folder that exists.
      rows: the rows of the batch, which share the slider.
      title: the page's heading.
      settings: names and values to show below it.

    Raises:
      OSError: the file cannot be written.
    """
    target = Path(path)
    page = render_history_html(rows, title=title, settings=settings)
    # In the same folder, since a replacement is atomic only inside one file system; opened as new, so that two writers
    # cannot share it, and with the permissions any new file gets.
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("x", encoding="utf-8", newline="\n") as stream:
            stream.write(page)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
