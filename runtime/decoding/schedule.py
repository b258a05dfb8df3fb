"""Unmasking schedules, computed on the host: how many masks each step commits.

The ratios of ``linear_time`` are bit-identical to those that PyTorch computes on CPU.
"""

from __future__ import annotations

import functools

import numpy as np

from runtime.models.config import UnmaskingSchedule


@functools.lru_cache(maxsize=256)
def transfer_ratios(steps: int, eps: float) -> np.ndarray:
    """Return the fraction of the remaining masks that each step of the schedule ``linear_time`` commits.

    The fraction is ``1 - t[i+1] / t[i]`` for ``t = linspace(1, eps)``; in the last step it is 1. ``torch.linspace``
    computes float32 values from both ends, with a step size rounded to float32. ``jnp.linspace`` and ``np.linspace``
    differ from it in the last bit for some numbers of steps, which is enough to move a token to another step.

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
    """Return R, the padded length of a ratio table, so that most requests on a canvas of this width share a shape.

    R is ``steps`` rounded up to a power of two, or ``width`` if that is larger.
    """
    return max(width, 1 << (steps - 1).bit_length())


def transfer_table(schedule: UnmaskingSchedule, steps: int, eps: float) -> np.ndarray:
    """Return the ratio table of a family's schedule: float32 ``[steps]``.

    Entry i is the fraction of a block's remaining masks that step i commits. The other schedules do not use the table,
    see :mod:`runtime.decoding.progress`; their entries are 0.
    """
    return transfer_ratios(steps, eps) if schedule == "linear_time" else np.zeros(steps, np.float32)


def masks_per_step(
    schedule: UnmaskingSchedule, masks: int, steps: int, *, eps: float, block_length: int
) -> tuple[int, ...]:
    """Return how many masks of a block each of its steps commits according to the schedule.

    The denoise loop commits exactly these numbers if no parallel rule applies, the model predicts no mask token, and
    a step is limited neither to a sub-block nor to a block's first position (``prediction_offset``). With the
    algorithm ``origin``, it draws the numbers at random instead. The
    schedule ``constant`` takes the number from the request; here it is 1.

    Args:
      schedule: the schedule of the model's family.
      masks: number of masks in the block when its first step starts.
      steps: number of steps of the block.
      eps: time at which ``linear_time`` ends.
      block_length: number of positions of the block, masked or not; only ``even_block`` uses it.

    Returns:
      One number per step. Steps with 0 run no forward pass.
    """
    counts, left = [], masks
    for step, ratio in enumerate(transfer_table(schedule, steps, eps)):
        match schedule:
            case "linear_time":
                count = int(left * ratio)
            case "even":
                count = masks // steps + (step < masks % steps)
            case "even_block":
                count = min(left, max(1, block_length // steps + (step < block_length % steps)))
            case "constant":
                count = min(left, 1)
        counts.append(count)
        left -= count
    return tuple(counts)
