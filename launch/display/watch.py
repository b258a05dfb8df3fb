"""`--watch`: the canvas unmasking live in the terminal.

It draws on stderr, since stdout carries the results, and on an interactive terminal only.
"""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from types import TracebackType
from typing import Literal, NamedTuple

from rich.cells import cell_len
from rich.console import Console, Group, OverflowMethod
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

TokenKind = Literal["prompt", "generated", "mask", "end"]

# The styles can be told apart without colour: new tokens are reversed, masks are blocks.
STYLES: dict[str, str] = {"prompt": "dim", "generated": "", "mask": "dim", "end": "dim"}
NEW_STYLE = "bold reverse green"
HEADING_STYLE = "bold cyan"
MASK, END = "░", "·"
END_RUN = 8  # this many consecutive end tokens are shown as one mark
COMPILING = "compiling: the canvas follows"
SHARE = 0.1  # the largest share of the time that may be spent on drawing
LINES_PER_ROW = 4  # rows that would get fewer lines, heading included, are counted and not shown


class WatchToken(NamedTuple):
    """The text and kind of one position of a canvas.

    The kind ``end`` stands for the end token and its repetitions.
    """

    text: str
    kind: TokenKind


@lru_cache(maxsize=1 << 15)
def printable(text: str, ascii_only: bool = False) -> str:
    """Return a token's text without control sequences: newlines are kept, tabs become four spaces.

    Control characters become their symbols (escape becomes ``␛``); other invisible characters, bidirectional overrides
    and lone surrogates become ``\\ufffd``. Joiners, which emoji and several scripts need, are kept.
    """
    shown = []
    for sign in text:
        category = unicodedata.category(sign)
        if sign == "\n":
            shown.append(sign)
        elif sign == "\t":
            shown.append("    ")
        elif ascii_only and not " " <= sign <= "~":
            shown.append("?")
        elif sign < " ":
            shown.append(chr(0x2400 + ord(sign)))
        elif sign == "\x7f":
            shown.append("\u2421")
        elif category in ("Cc", "Cf", "Cs", "Zl", "Zp") and sign not in "\u200c\u200d":
            shown.append("\ufffd")
        else:
            shown.append(sign)
    return "".join(shown)


def fold(pieces: Iterator[tuple[str, str]], width: int) -> tuple[list[list[tuple[str, str]]], int | None]:
    """Break pieces (text, style) into lines of at most ``width`` cells, at any character.

    Returns:
      The lines, each a list of pieces, and the index of the first line with a new token; None if there is none.
    """
    lines: list[list[tuple[str, str]]] = [[]]
    column, first_new = 0, None
    for text, style in pieces:
        if first_new is None and style == NEW_STYLE:
            first_new = len(lines) - 1
        size = cell_len(text)
        if "\n" not in text and column + size <= width:
            lines[-1].append((text, style))
            column += size
            continue
        for sign in text:
            size = 0 if sign == "\n" else cell_len(sign)
            if sign == "\n" or column + size > width:
                lines.append([])
                column = 0
            if sign != "\n":
                lines[-1].append((sign, style))
                column += size
    return lines, first_new


@dataclass
class RowView:
    """State of one row between two drawings.

    Attributes:
      masked: whether each position was masked in the last drawing.
      top: index of the first line that was shown.
    """

    masked: list[bool] = field(default_factory=list)
    top: int = 0

    def pieces(self, tokens: Sequence[tuple[str, TokenKind]], ascii_only: bool) -> Iterator[tuple[str, str]]:
        """Yield the row in pieces (text, style); consecutive end tokens form one piece."""
        ends = 0
        for position, (text, kind) in enumerate(tokens):
            if kind == "end":
                ends += 1
                continue
            if ends >= END_RUN:
                yield end_mark(ends), STYLES["end"]
            elif ends:
                yield ("." if ascii_only else END) * ends, STYLES["end"]
            ends = 0
            if kind == "mask":
                yield ("#" if ascii_only else MASK), STYLES["mask"]
                continue
            new = position < len(self.masked) and self.masked[position]
            shown = printable(text, ascii_only)
            if new and shown.startswith("\n") and not ascii_only:
                # A line break is invisible, so a symbol is highlighted.
                yield "↵", NEW_STYLE
            yield shown, NEW_STYLE if new else STYLES[kind]
        if ends:
            yield end_mark(ends), STYLES["end"]

    def lines(self, tokens: Sequence[tuple[str, TokenKind]], width: int, height: int, ascii_only: bool) -> list[Text]:
        """Return the part of the row that fits into ``height`` lines. It is not scrolled past the first new token."""
        every, first_new = fold(self.pieces(tokens, ascii_only), width)
        self.masked = [kind == "mask" for _, kind in tokens]
        inner = max(1, height - 2)
        top = min(self.top, max(0, len(every) - inner))
        if first_new is not None:
            top = min(max(top, first_new - inner + 1), first_new)
        self.top = top
        top, bottom = visible_lines(len(every), height, top)
        lines = [as_text(line) for line in every[top:bottom]]
        if height >= 3 and top:
            lines.insert(0, cut_mark(top, "above"))
        if height >= 3 and bottom < len(every):
            lines.append(cut_mark(len(every) - bottom, "below"))
        return lines


def visible_lines(total: int, height: int, top: int) -> tuple[int, int]:
    """Return which of ``total`` lines to show in ``height`` from line ``top`` on: the first, and one after the last.

    With a height of 3 or more, one line is left free on each side on which lines are cut.
    """
    if total <= height:
        return 0, total
    if height < 3:
        return top, min(total, top + height)
    if top <= 1:
        return 0, height - 1
    if top > total - height:
        return total - height + 1, total
    return top, top + height - 2


def as_text(line: list[tuple[str, str]]) -> Text:
    """Convert a line to rich text; adjacent pieces of one style share their escape sequences."""
    runs = groupby(line, key=lambda piece: piece[1])
    merged = [("".join(text for text, _ in run), style) for style, run in runs]
    return Text.assemble(*merged, no_wrap=True, overflow="crop")


def end_mark(count: int) -> str:
    """Return the mark that stands for ``count`` consecutive end tokens."""
    return "<end>" if count == 1 else f"<end x{count}>"


def cut_mark(count: int, where: str) -> Text:
    """Return the mark that stands for ``count`` lines that did not fit."""
    return Text(f"  {plural(count, 'line')} {where}", style="dim italic", no_wrap=True, overflow="crop")


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as ``1 more line`` or ``2 more lines``."""
    return f"{count} more {noun}{'' if count == 1 else 's'}"


class CanvasWatcher:
    """Draws the canvas as it unmasks, with newly committed tokens highlighted.

    A context manager that restores the terminal on exit, also after an exception. Without an interactive terminal it
    prints nothing, and :attr:`active` is False. ``steps``, the number of denoise steps, may be set later::

        with CanvasWatcher(steps=256) as watcher:
            for step, canvas in engine.stream_tokens(...):
                if watcher.active:
                    watcher.update(step, rows_of(canvas))
    """

    def __init__(
        self,
        steps: int,
        *,
        titles: Sequence[str] = (),
        console: Console | None = None,
        frames_per_second: float = 20.0,
        transient: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare to watch one generation; nothing is drawn yet.

        Args:
          steps: number of denoise steps, at least 1.
          titles: a heading for each row; without titles, the rows of a batch are numbered.
          console: where to draw; default stderr.
          frames_per_second: the largest number of drawings per second; fewer if drawing is slow, so that it does not
            delay the steps. The first and last canvas are always drawn. Tokens committed in steps that were not drawn
            count as new in the next drawing.
          transient: erase the last drawing on exit.
          clock: returns seconds; for tests.

        Raises:
          ValueError: steps is below 1.
        """
        if steps < 1:
            raise ValueError(f"steps is {steps}; it must be at least 1")
        self.steps = steps
        self._titles = titles
        self._console = Console(stderr=True) if console is None else console
        # The environment can make rich treat a pipe as a terminal, for colours; canvases cannot be drawn on a pipe.
        self._active = self._console.is_interactive and self._console.is_terminal
        if console is None:
            self._active = self._active and sys.stderr.isatty()
        self._least_pause = self._pause = 1.0 / frames_per_second
        self._transient = transient
        self._clock = clock
        self._live: Live | None = None
        self._views: list[RowView] = []
        self._started = self._drawn = 0.0
        self._waiting: tuple[int, Sequence[Sequence[tuple[str, TokenKind]]]] | None = None

    @property
    def active(self) -> bool:
        """Whether there is an interactive terminal to draw on; otherwise :meth:`update` does nothing."""
        return self._active

    def __enter__(self) -> CanvasWatcher:
        self._started = self._clock()
        if self._active:
            # stdout is not redirected, because it carries results. Warnings appear above the drawing.
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                redirect_stdout=False,
                transient=self._transient,
                vertical_overflow="crop",
            )
            self._live.start()
            self._live.update(Text(COMPILING, style="dim"), refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is None:
            return
        try:
            if kind is None and self._waiting is not None:
                self._draw(*self._waiting)
        finally:
            self._live.stop()
            self._live = None

    def update(self, step: int, rows: Sequence[Sequence[tuple[str, TokenKind]]]) -> None:
        """Show the canvas after ``step`` steps.

        Args:
          step: number of steps done; 0 for the canvas before the first step.
          rows: the tokens of each row, as :class:`WatchToken` or (text, kind). A position counts as new if it was a
            mask in the previous drawing.

        Raises:
          RuntimeError: the call is outside of the ``with`` block.
        """
        if not self._active:
            return
        if self._live is None:
            raise RuntimeError("CanvasWatcher.update outside of its with block")
        now = self._clock()
        if self._views and step < self.steps and now - self._drawn < self._pause:
            self._waiting = (step, rows)
            return
        self._draw(step, rows)
        self._drawn = self._clock()
        self._pause = max(self._least_pause, (self._drawn - now) * (1 - SHARE) / SHARE)

    def _draw(self, step: int, rows: Sequence[Sequence[tuple[str, TokenKind]]]) -> None:
        assert self._live is not None
        self._waiting = None
        self._live.update(self.frame(step, rows), refresh=True)

    def frame(self, step: int, rows: Sequence[Sequence[tuple[str, TokenKind]]]) -> Group:
        """Return the drawing: progress, then the lines of as many rows as fit into the console."""
        width, height = self._console.size
        ascii_only = self._console.options.ascii_only
        self._views += [RowView() for _ in range(len(self._views), len(rows))]
        # One line for the progress, and one below for the cursor.
        room = max(2, height - 2)
        fit = max(1, min(len(rows), room // LINES_PER_ROW))
        if fit < len(rows):
            room -= 1
        cut: OverflowMethod = "crop" if ascii_only else "ellipsis"
        drawn: list[Text] = []
        for number, tokens in enumerate(rows[:fit]):
            # Later rows get the lines that earlier rows left over.
            share = (room - len(drawn)) // (fit - number)
            if len(rows) > 1 or self._titles:
                title = self._titles[number] if number < len(self._titles) else f"row {number}"
                title = printable(title, ascii_only).replace("\n", " ")
                drawn.append(Text(title, style=HEADING_STYLE, no_wrap=True, overflow=cut))
                share -= 1
            drawn += self._views[number].lines(tokens, width, max(1, share), ascii_only)
        if fit < len(rows):
            drawn.append(Text(f"and {plural(len(rows) - fit, 'row')}", style="dim italic", no_wrap=True))
        masks = sum(kind == "mask" for tokens in rows for _, kind in tokens)
        return Group(self._progress(step, masks), *drawn)

    def _progress(self, step: int, masks: int) -> Table:
        grid = Table.grid(padding=(0, 2), expand=True)
        for column in range(3):
            grid.add_column(no_wrap=True, overflow="crop", ratio=1 if column == 1 else None)
        seconds = self._clock() - self._started
        # The line contains the legend: a mask, and a new token.
        sign = "#" if self._console.options.ascii_only else MASK
        grid.add_row(
            Text(f"step {step:>{len(str(self.steps))}}/{self.steps}" + ("" if step else ", compiling")),
            ProgressBar(total=self.steps, completed=step),
            Text.assemble((sign, STYLES["mask"]), f" {masks} masked  ", ("new", NEW_STYLE), f"  {seconds:.1f} s"),
        )
        return grid
