"""The schedules on the host commit what the compiled loop commits."""

from __future__ import annotations

import numpy as np
import pytest

from runtime import DiffusionConfig, Engine
from runtime.decoding.block_schedule import steps_of_a_block
from runtime.decoding.schedule import masks_per_step
from tests import golden_cases

PROMPT = 12  # whole blocks of all models here


def committed(engine: Engine, config: DiffusionConfig, length: int) -> list[tuple[int, ...]]:
    """How many masks each step of each block committed, by the block's first and last such step."""
    result = engine.generate_tokens(np.full((1, PROMPT), 5, np.int32), config=config)
    assert result.stats.masks_left == 0
    steps = result.commit_steps[0, PROMPT:]
    blocks = [steps[start : start + length] for start in range(0, len(steps), length)]
    # A block has its own range of step numbers, whether or not its last steps run.
    per_block = config.attention_block_length or steps_of_a_block(config, length)
    return [tuple(np.bincount(block - number * per_block).tolist()) for number, block in enumerate(blocks)]


@pytest.mark.parametrize(
    ("name", "new", "length", "steps", "eps"),
    [
        ("dream_tiny", 24, None, 24, 1e-3),
        ("dream_tiny", 24, None, 40, 1e-3),
        ("dream_tiny", 23, None, 7, 0.1),
        ("dream_tiny", 20, 8, 20, 1e-3),
        ("llada_tiny", 24, 8, 24, 1e-3),
        ("llada_tiny", 20, 8, 13, 1e-3),
        ("llada_tiny", 20, 8, 40, 1e-3),
        ("sdar_tiny", 16, 4, 16, 1e-3),
        ("sdar_tiny", 16, 4, 12, 1e-3),
        ("sdar_tiny", 16, 4, 40, 1e-3),
    ],
)
def test_the_loop_commits_what_the_schedule_says(
    name: str, new: int, length: int | None, steps: int, eps: float
) -> None:
    engine = golden_cases.engine("data=1", golden_cases.FOLDER.parent / name)
    family = engine.config.family
    config = DiffusionConfig(
        new, steps=steps, eps=eps, algorithm=family.algorithms[-1], block_length=length, suppress_mask=True
    )
    blocks = length or new
    if family.attention == "block_causal":
        config = config.replace(attention_block_length=blocks)
    assert family.schedule is not None
    expected = []
    for start in range(0, new, blocks):
        masks, per_block = min(blocks, new - start), steps_of_a_block(config, blocks)
        counts = masks_per_step(family.schedule, masks, per_block, eps=eps, block_length=blocks)
        assert (sum(counts), len(counts)) == (masks, per_block)
        expected.append(tuple(np.trim_zeros(counts, "b")))
    assert committed(engine, config, blocks) == expected
