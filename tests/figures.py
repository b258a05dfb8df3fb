"""Figures that a command draws, and a check that their texts can be read."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that receives each figure instead of its file; skip the test without matplotlib."""
    figure = pytest.importorskip("matplotlib.figure")
    figures: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, **options: figures.append(self))
    return figures


def assert_texts_are_apart(figure: Any, more: Sequence[Any] = ()) -> None:
    """Draw a figure, and check that no text in its axes overlaps another or the figure's edge.

    Args:
      figure: the figure.
      more: other texts to check with them, such as the labels of an axis.
    """
    importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure).draw()
    texts = [text for axes in figure.axes for text in axes.texts] + list(more)
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    for (name, one), (other_name, other) in itertools.combinations(boxes, 2):
        assert not one.overlaps(other), (name, other_name)
    for name, box in boxes:
        assert 0 <= box.x0 <= box.x1 <= figure.bbox.x1, name
        assert 0 <= box.y0 <= box.y1 <= figure.bbox.y1, name
