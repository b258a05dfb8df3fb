"""Labels beside points of a plot, placed so that none covers another one or a point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

# Pixels between a label and what it must not cover
_MARGIN = 1.0


@dataclass(frozen=True)
class Label:
    """A text, the point that it names (in data coordinates), and its colour."""

    text: str
    at: tuple[float, float]
    color: str


def _distance(one: Bbox, other: Bbox) -> float:
    right = max(one.x0 - other.x1, other.x0 - one.x1, 0.0)
    above = max(one.y0 - other.y1, other.y0 - one.y1, 0.0)
    return math.hypot(right, above)


def place_labels(
    axes: Axes,
    labels: Sequence[Label],
    offsets: Sequence[tuple[float, float]],
    fontsize: float,
    taken: Sequence[Bbox] = (),
    marks: Sequence[Bbox] = (),
) -> None:
    """Write each label at the first offset from its point where it covers nothing and lies inside the axes.

    Call this when all else is drawn, because the places depend on the layout. A label that fits nowhere is written at
    the last offset.

    Args:
      axes: where to write.
      labels: the labels, the most important ones first.
      offsets: places to try, in points to the right of a label's point and above it. An offset to the left is the
        label's right end, one above is its bottom, and so on.
      fontsize: size of the texts in points.
      taken: rectangles, in pixels, that no label may cover.
      marks: what each label names, as rectangles in pixels, in the order of the labels. A label is only written where
        its own mark is the nearest one.
    """
    from matplotlib.figure import Figure

    assert isinstance(axes.figure, Figure)
    axes.figure.draw_without_rendering()
    boxes = list(taken)
    for number, label in enumerate(labels):
        for right, above in offsets:
            text = axes.annotate(
                label.text, label.at, (right, above), textcoords="offset points", fontsize=fontsize, color=label.color,
                horizontalalignment="left" if right > 0 else "right" if right < 0 else "center",
                verticalalignment="bottom" if above > 0 else "top" if above < 0 else "center",
            )  # fmt: skip
            # The layout is done: a label must not change it.
            text.set_in_layout(False)
            box = text.get_window_extent().padded(_MARGIN)
            is_inside = axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1)
            is_inside = is_inside and axes.bbox.containsy(box.y0) and axes.bbox.containsy(box.y1)
            distances = [_distance(box, mark) for mark in marks]
            is_nearest = not marks or distances[number] <= min(distances)
            if (is_inside and is_nearest and not any(box.overlaps(other) for other in boxes)) or (
                right,
                above,
            ) == offsets[-1]:
                boxes.append(box)
                break
            text.remove()
