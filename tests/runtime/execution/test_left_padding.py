"""Left-padded batches: where rows begin, and the way to start-aligned rows and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from runtime.execution.left_padding import end_align, left_padded, read_rows, row_starts, start_align, unpadded_rows
from runtime.planner.presets import preset

CONFIG = replace(preset("gpt2"), vocab_size=64)
PROMPTS = [[5, 6, 7], [8], [9, 10]]


def test_rows_survive_left_padding() -> None:
    ids, mask = left_padded(PROMPTS, 3)
    assert ids.tolist() == [[5, 6, 7], [3, 3, 8], [3, 9, 10]]
    assert row_starts(mask).tolist() == row_starts(mask.astype(bool)).tolist() == [0, 2, 1]
    assert [row.tolist() for row in unpadded_rows(ids, mask)] == PROMPTS
    twice = np.repeat(np.hstack([ids, np.full((3, 1), 4)]), 2, axis=0)
    assert [row.tolist() for row in unpadded_rows(twice, mask)] == [[*row, 4] for row in PROMPTS for _ in range(2)]
    rows = read_rows(ids, mask, CONFIG)
    assert [row[:length].tolist() for row, length in zip(rows.tokens, rows.lengths, strict=True)] == PROMPTS
    assert rows.real.tolist() == mask.astype(bool).tolist()
    assert rows.real_canvas(2).tolist() == np.hstack([mask, np.ones((3, 2))]).astype(bool).tolist()
    assert end_align(rows.tokens, rows.lengths, np.full_like(ids, 3)).tolist() == ids.tolist()
    assert start_align(ids, rows.lengths, np.zeros_like(ids)).tolist() == rows.tokens.tolist()
