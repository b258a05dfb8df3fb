"""Draw a canvas that unmasks, as an animated SVG, from a run of the demo checkpoint.

python -m launch.docs.canvas_picture launch/docs/canvas.svg
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from checkpoints import DEMO
from launch.display.canvas_view import CanvasView
from launch.display.history_html import HistoryRow, HistoryToken
from runtime import Engine

PROMPT = "def count_vowels(text):\n"
NEW_TOKENS = 40
# Pixels of a character and a line; seconds of a denoise step, and of the pause before the animation starts again.
_WIDTH, _HEIGHT, _MARGIN = 8.4, 22, 14
_STEP_SECONDS, _PAUSE_SECONDS = 0.15, 3.0


def run_demo() -> HistoryRow:
    """Complete the prompt on one device, positions in random order (``origin``). Returns each token with its step."""
    engine = Engine.load(DEMO, mesh="tensor=1")
    config = engine.with_end_tokens(
        engine.published(max_new_tokens=NEW_TOKENS, steps=NEW_TOKENS, algorithm="origin", seed=0)
    )
    ids, mask = engine.encode(PROMPT)
    result = engine.generate_tokens(ids, mask, config.replace(early_stop=True))
    completions = engine.completions([PROMPT], ids, mask, result)
    return CanvasView(engine, ids, mask, 1).history_rows(result, [PROMPT], completions)[0]


def draw(row: HistoryRow) -> str:
    """Return the SVG. A viewer that does not animate it shows the finished text."""
    tokens = [token for token in row.tokens if not token.end]
    duration = row.steps * _STEP_SECONDS + _PAUSE_SECONDS
    places = list(_layout(tokens))
    width = max(column + len(token.text) for token, column, _ in places) * _WIDTH + 2 * _MARGIN
    height = (places[-1][2] + 1) * _HEIGHT + 2 * _MARGIN
    parts = [part for place in places for part in _token(*place, duration)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'height="{height:.0f}" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">',
            f"<title>{escape(row.title.strip())} is completed in {row.steps} denoise steps</title>",
            f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#101820"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _layout(tokens: list[HistoryToken]) -> Iterator[tuple[HistoryToken, int, int]]:
    """Yield each token with the column and line at which it begins."""
    column = line = 0
    for token in tokens:
        yield token, column, line
        newline, last = token.text.rpartition("\n")[1:]
        line += token.text.count("\n")
        column = len(last) if newline else column + len(token.text)


def _token(token: HistoryToken, column: int, line: int, duration: float) -> Iterator[str]:
    """Yield the SVG elements of a token: its text, and the mask that hides it until the step that commits it."""
    left, top = _MARGIN + column * _WIDTH, _MARGIN + line * _HEIGHT
    text = token.text.replace("\n", " ").rstrip()
    given = token.step is None or token.step < 0
    color = "#8fa3b0" if given else "#7ee787"
    share = 0.0 if given or token.step is None else (token.step + 1) * _STEP_SECONDS / duration

    def appear(values: str) -> str:
        return (
            f'<animate attributeName="opacity" values="{values}" keyTimes="0;{share:.4f}" calcMode="discrete" '
            f'dur="{duration:g}s" repeatCount="indefinite"/>'
        )

    if text:
        change = "" if given else appear("0;1")
        yield (
            f'<text x="{left:.1f}" y="{top + 15}" fill="{color}" textLength="{len(text) * _WIDTH:.1f}" '
            f'xml:space="preserve">{escape(text)}{change}</text>'
        )
    if not given:
        size = max(1, len(text)) * _WIDTH - 2
        yield (
            f'<rect x="{left:.1f}" y="{top + 2}" width="{size:.1f}" height="16" rx="3" fill="#3b4b59" opacity="0">'
            f"{appear('1;0')}</rect>"
        )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(run_demo()), "utf-8")
