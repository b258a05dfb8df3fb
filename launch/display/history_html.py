"""``--history_html``: the finished text as a page, each token coloured by the step that committed it.

The page is a single file without network requests. A slider (or ``#step=12`` in its address) shows any step.
``history.html`` beside this module is its template.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.display.pages import content_security_policy, page_template
from runtime import replace_file


@dataclass(frozen=True)
class HistoryToken:
    """One position of a finished canvas.

    Attributes:
      text: the token's text; the page never interprets it.
      step: the step that committed it, from 0 as in ``GenerationResult.commit_steps``; -1 for a token of the prompt,
        None if it is still masked.
      end: whether it follows the end of the text (the end token and its repetitions); the page folds these into one
        button.
    """

    text: str
    step: int | None
    end: bool = False


@dataclass(frozen=True)
class HistoryRow:
    """One row of the page.

    Attributes:
      title: the row's heading.
      tokens: the positions of the row without padding, prompt included.
      steps: number of denoise steps; every token's step is smaller.
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
    """Render the page.

    Args:
      rows: the rows of the batch, which share the slider.
      title: the page's heading.
      settings: names and values to show below the heading.

    Returns:
      A complete HTML document; the data in it is ASCII.
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
    # A script element ends at the first "</script", so the data must not contain "<".
    data = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")
    parts = {
        "title": html.escape(title.encode("utf-8", "replace").decode("utf-8")),
        "data": data,
        "policy": content_security_policy(template),
    }
    # One pass over the template, so that {{data}} in a title is not replaced.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def write_history_html(
    path: str | os.PathLike[str], rows: Sequence[HistoryRow], *, title: str, settings: Mapping[str, str]
) -> None:
    """Write the page; an existing file is replaced atomically.

    Args:
      path: the file, in a folder that exists.
      rows: the rows of the batch, which share the slider.
      title: the page's heading.
      settings: names and values to show below the heading.

    Raises:
      OSError: the file cannot be written.
    """
    target = Path(path)
    page = render_history_html(rows, title=title, settings=settings)
    replace_file(target, [page.encode("utf-8")])
