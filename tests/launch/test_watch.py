"""The live canvas in the terminal: its drawing, and text that must not reach the terminal."""

import io
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from launch.display.watch import (
    COMPILING,
    MASK,
    NEW_STYLE,
    CanvasWatcher,
    RowView,
    WatchToken,
    fold,
    printable,
    visible_lines,
)

SHOW_CURSOR = "\x1b[?25h"
HIDE_CURSOR = "\x1b[?25l"


def terminal(width=60, height=20, **options):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, **options)


def written(console):
    return console.file.getvalue()


def frame_text(watcher, console, step, rows):
    """Return the lines of one frame, without styles."""
    plain = Console(file=io.StringIO(), width=console.width, height=console.height, legacy_windows=False)
    plain.print(watcher.frame(step, rows))
    return plain.file.getvalue().rstrip("\n").split("\n")


def masks(count):
    return [WatchToken("<|mask|>", "mask")] * count


def test_draws_progress_text_and_masks():
    console = terminal()
    with CanvasWatcher(4, console=console) as watcher:
        assert watcher.active
        watcher.update(0, [[("def f", "prompt"), *masks(3)]])
        watcher.update(4, [[("def f", "prompt"), ("(", "generated"), ("x", "generated"), *masks(1)]])
    out = written(console)
    assert "step 0/4" in out
    assert "step 4/4" in out
    assert out.split("step 4/4")[0].count(MASK) == 3 + 1, "and the legend's"
    assert out.index(COMPILING) < out.index("step 0/4, compiling")
    assert "compiling" not in out.split("step 4/4")[1]
    assert MASK * 3 in out
    assert "3 masked" in out
    assert "1 masked" in out


def test_only_tokens_set_since_the_last_drawing_are_new():
    view = RowView()
    first = [("p", "prompt"), ("a", "generated"), *masks(2)]
    assert NEW_STYLE not in [style for _, style in view.pieces(first, False)]
    view.lines(first, 40, 10, False)
    second = [("p", "prompt"), ("a", "generated"), ("b", "generated"), *masks(1)]
    assert [text for text, style in view.pieces(second, False) if style == NEW_STYLE] == ["b"]
    view.lines(second, 40, 10, False)
    assert NEW_STYLE not in [style for _, style in view.pieces(second, False)]


def test_a_new_line_break_is_marked():
    view = RowView(masked=[True])
    assert list(view.pieces([("\n", "generated")], False)) == [("↵", NEW_STYLE), ("\n", NEW_STYLE)]
    assert [text for text, _ in view.pieces([("\n", "generated")], True)] == ["\n"]


def test_a_pipe_gets_nothing():
    console = Console(file=io.StringIO())
    with CanvasWatcher(2, console=console) as watcher:
        assert not watcher.active
        watcher.update(0, [masks(3)])
        watcher.update(2, [masks(3)])
    assert written(console) == ""


def test_a_dumb_terminal_gets_nothing():
    console = terminal(_environ={"TERM": "dumb"})
    with CanvasWatcher(1, console=console) as watcher:
        assert not watcher.active
        watcher.update(1, [masks(3)])
    assert written(console) == ""


def test_colours_forced_on_a_pipe_are_no_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("TERM", raising=False)
    with CanvasWatcher(1) as watcher:
        assert not watcher.active
        watcher.update(1, [masks(3)])
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_stdout_stays_the_programs_own(monkeypatch):
    results = io.StringIO()
    monkeypatch.setattr(sys, "stdout", results)
    console = terminal()
    with CanvasWatcher(1, console=console) as watcher:
        watcher.update(0, [masks(2)])
        print("a result")
        watcher.update(1, [[("x", "generated")]])
    assert results.getvalue() == "a result\n"
    assert "a result" not in written(console)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_gives_the_terminal_back(error):
    console = terminal()
    before = sys.stdout, sys.stderr

    def interrupted():
        with CanvasWatcher(9, console=console) as watcher:
            watcher.update(0, [masks(3)])
            raise error("stop")

    with pytest.raises(error, match="stop"):
        interrupted()
    out = written(console)
    assert HIDE_CURSOR in out
    assert out.rindex(SHOW_CURSOR) > out.rindex(HIDE_CURSOR)
    assert (sys.stdout, sys.stderr) == before


def test_a_row_that_cannot_be_drawn_gives_the_terminal_back():
    console = terminal()

    def broken():
        with CanvasWatcher(9, console=console) as watcher:
            watcher.update(0, [[("x", "no such kind")]])

    with pytest.raises(KeyError):
        broken()
    out = written(console)
    assert out.rindex(SHOW_CURSOR) > out.rindex(HIDE_CURSOR)


def test_update_outside_of_its_block_is_an_error():
    with pytest.raises(RuntimeError, match="with block"):
        CanvasWatcher(1, console=terminal()).update(0, [masks(1)])
    with pytest.raises(ValueError, match="at least 1"):
        CanvasWatcher(0, console=terminal())


def test_markup_and_control_characters_are_inert():
    console = terminal(color_system=None)
    tokens = [
        WatchToken("[bold red]x[/]", "generated"),
        WatchToken("\x1b[2J\x1b]0;title\x07", "generated"),
        WatchToken("a\rb\x9bc\u202ed\ud800e\x7f", "prompt"),
    ]
    with CanvasWatcher(1, titles=["[blink]\x1b[5mtitle\nline"], console=console) as watcher:
        watcher.update(1, [tokens])
    out = written(console)
    assert "[bold red]x[/]" in out
    assert "␛[2J␛]0;title␇" in out
    assert "a␍b\ufffdc\ufffdd\ufffde␡" in out
    assert "[blink]␛[5mtitle line" in out
    out.encode("utf-8")
    # The only remaining escape sequences are the display's own cursor movements.
    for forbidden in ("\x1b[5m", "\x1b[2J", "\x1b]0", "\x07", "\x9b", "\u202e", "\x7f"):
        assert forbidden not in out


@given(st.text(alphabet=st.characters(), max_size=40))
@settings(max_examples=200, deadline=None)
def test_printable_leaves_nothing_that_a_terminal_obeys(text):
    shown = printable(text)
    shown.encode("utf-8")
    assert all(sign == "\n" or (ord(sign) >= 32 and not 0x7F <= ord(sign) <= 0x9F) for sign in shown)
    assert set(printable(text, True)) <= {"\n", *map(chr, range(32, 127))}
    assert printable(text).count("\n") == text.count("\n")


@given(st.lists(st.text(alphabet="ab \n\t你😀é", max_size=9), max_size=12), st.integers(2, 12))
@settings(max_examples=200, deadline=None)
def test_folded_lines_fit_and_lose_nothing(texts, width):
    lines, _ = fold(iter([(printable(text), "") for text in texts]), width)
    joined = ["".join(text for text, _ in line) for line in lines]
    assert all(cell_len(line) <= width for line in joined)
    assert "".join(joined) == printable("".join(texts)).replace("\n", "")


@given(st.integers(1, 60), st.integers(1, 30), st.integers(0, 59), st.integers(0, 59))
@settings(max_examples=300, deadline=None)
def test_the_first_new_line_is_always_in_view(total, height, before, new):
    new %= total
    tokens = [("l\n", "generated")] * new + [("NEW", "generated")] + [("\nl", "generated")] * (total - new - 1)
    view = RowView(masked=[position == new for position in range(total)], top=before)
    lines = [line.plain for line in view.lines(tokens, 20, height, False)]
    assert len(lines) <= height
    assert "NEW" in lines
    hidden = sum(int(line.split()[0]) for line in lines if "more line" in line)
    marks = sum("more line" in line for line in lines)
    if height >= 3:
        assert hidden + len(lines) - marks == total


def test_the_window_stays_where_it_is_when_nothing_asks_it_to_move():
    view = RowView(masked=[True] * 40, top=17)
    lines = view.lines([("l\n", "generated")] * 20 + masks(1) + [("\nl", "prompt")] * 19, 20, 10, False)
    assert view.top == 0  # new tokens on the first line
    view.top = 17
    lines = view.lines([("l\n", "generated")] * 20 + masks(1) + [("\nl", "prompt")] * 19, 20, 10, False)
    assert view.top == 17
    assert [lines[0].plain, lines[-1].plain] == ["  17 more lines above", "  15 more lines below"]
    assert visible_lines(40, 10, 17) == (17, 25)


@pytest.mark.parametrize("height", range(4, 30))
@pytest.mark.parametrize("count", [0, 1, 3, 8])
def test_every_frame_fits_the_terminal(height, count):
    console = terminal(width=30, height=height)
    rows = [[("word ", "prompt")] * 30 + [("\n", "generated")] * 30 + masks(100)] * count
    lines = frame_text(CanvasWatcher(9, console=console), console, 3, rows)
    assert len(lines) <= height
    assert all(cell_len(line) <= 30 for line in lines)
    if count == 8:
        assert lines[-1].startswith("and ")


def test_end_tokens_are_folded():
    console = terminal()
    end = ("<|endoftext|>", "end")
    lines = frame_text(CanvasWatcher(9, console=console), console, 3, [[("x", "prompt"), end, *masks(1), *[end] * 300]])
    assert lines[1].rstrip() == f"x·{MASK}<end x300>"


def test_an_ascii_terminal_gets_ascii():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=stream, force_terminal=True, width=40, height=12)
    row = [("é\x1b", "prompt"), *masks(2), ("e", "end"), *masks(1)]
    with CanvasWatcher(9, console=console, titles=["long title é " * 9]) as watcher:
        watcher.update(0, [row])
        watcher.update(9, [[("\n", "generated")] * len(row)])
    stream.flush()
    assert b"step 0/9" in stream.buffer.getvalue()
    assert "".join(text for text, _ in RowView().pieces(row, True)) == "??##.#"


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_fast_steps_are_not_all_drawn_but_the_last_is():
    console, clock = terminal(), Clock()
    with CanvasWatcher(100, console=console, clock=clock, frames_per_second=10) as watcher:
        for step in range(51):
            watcher.update(step, [[("t", "generated")] * step + masks(100 - step)])
            clock.now += 0.03
    out = written(console)
    assert "step   0/100" in out
    assert "step   1/100" not in out
    assert "step   4/100" in out
    # The run ended early; leaving the context draws its last canvas.
    assert "step  50/100" in out
    assert out.count("masked") < 20


def test_what_was_not_drawn_is_new_in_the_next_drawing():
    console, clock = terminal(), Clock()
    with CanvasWatcher(9, console=console, clock=clock, frames_per_second=1) as watcher:
        watcher.update(0, [masks(3)])
        watcher.update(1, [[("one", "generated"), *masks(2)]])
        clock.now += 5
        watcher.update(2, [[("one", "generated"), ("two", "generated"), *masks(1)]])
    assert "\x1b[1;7;32monetwo\x1b[0m" in written(console)


def test_transient_leaves_nothing_behind():
    console = terminal()
    with CanvasWatcher(1, console=console, transient=True) as watcher:
        watcher.update(1, [[("gone", "generated")]])
    assert written(console).rstrip("\n").endswith("\x1b[2K")
