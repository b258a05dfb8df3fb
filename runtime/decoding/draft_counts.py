"""How many drafts a row has: bounds, and the number that ``draft_steps="auto"`` stands for."""

from __future__ import annotations

# A pass over more canvases is slower than the steps it could save, on any device that the planner knows.
MAX_DRAFT_STEPS = 63
# The value that leaves the number to the mesh and the number of rows.
AUTO_DRAFTS = "auto"
DRAFT_AXES = ("none", "data")


def drafts_on_idle_devices(data: int, rows: int) -> int:
    """Return how many drafts of each row fit on a ``data`` axis such that no device computes more than one canvas.

    It is data / rows - 1 if the rows divide the axis. Otherwise it is the largest smaller number whose canvases can be
    divided over the axis without padding.

    Args:
      data: size of the axis.
      rows: rows that are generated at a time.
    """
    most = min(data // max(rows, 1), MAX_DRAFT_STEPS + 1)
    return max((count for count in range(1, most + 1) if data % count == 0), default=1) - 1
