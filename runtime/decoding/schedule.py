"""The denoising schedule, bit for bit as CPU PyTorch computes it."""

from __future__ import annotations

import functools

import numpy as np


@functools.lru_cache(maxsize=256)
def transfer_ratios(steps: int, eps: float) -> np.ndarray:
    """Share of the masks that are left which each step transfers: ``1 - t[i+1] / t[i]`` for ``t = linspace(1, eps)``.

    ``torch.linspace`` in float32 walks from both ends with a step computed in float32; ``jnp.linspace`` and
    ``np.linspace`` differ from it in the last bit for some numbers of steps, which is enough to move a token to
    another step. The last step transfers everything.

    Args:
      steps: number of denoise steps, at least 1.
      eps: time at which the schedule ends.

    Returns:
      float32 ``[steps]``, read-only.
    """
    end = np.float32(eps)
    step = np.float64((end - np.float32(1.0)) / np.float32(steps))
    index = np.arange(steps + 1, dtype=np.float64)
    from_start = 1.0 + step * index
    from_end = np.float64(end) - step * (steps - index)
    times = np.where(index < (steps + 1) // 2, from_start, from_end).astype(np.float32)
    ratios = np.float32(1.0) - times[1:] / times[:-1]
    ratios[-1] = 1.0
    ratios.setflags(write=False)
    return ratios


def padded_steps(steps: int, width: int) -> int:
    """R, what a table of ratios is padded to: the same for every number of steps up to a canvas of this width."""
    return max(width, 1 << (steps - 1).bit_length())


def transfer_table(schedule: str, steps: int, eps: float) -> np.ndarray:
    """Share of a block's remaining masks that each step transfers by a family's schedule, float32 ``[steps]``.

    The ``even`` schedule counts the masks that a block begins with, see :mod:`runtime.decoding.progress`, and reads no
    shares.
    """
    return transfer_ratios(steps, eps) if schedule == "linear_time" else np.zeros(steps, np.float32)
