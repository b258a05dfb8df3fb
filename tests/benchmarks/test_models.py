from __future__ import annotations

import pytest

from benchmarks.models import forward_flops
from runtime.planner.presets import preset


# Multiply-adds of one layer's matrices per position.
@pytest.mark.parametrize(
    ("model", "matrices"),
    [
        ("qwen2.5-7b", 28 * 3584 * (2 * 28 * 128 + 2 * 4 * 128 + 3 * 18944)),
        ("qwen3-8b", 36 * 4096 * (2 * 32 * 128 + 2 * 8 * 128 + 3 * 12288)),
        ("gpt2", 12 * 768 * (4 * 768 + 2 * 3072)),
    ],
)
def test_operations_of_a_forward_pass(model: str, matrices: int) -> None:
    config = preset(model)
    pair = 2 * config.num_layers * config.num_heads * config.head_dim
    head = 10 * config.hidden_size * config.vocab_size
    assert forward_flops(config, 2, 64, 10) == 2 * (2 * 64 * (matrices + 64 * pair) + head)
    # A window attends to all cached positions.
    assert forward_flops(config, 2, 1, 10, keys=512) == 2 * (2 * (matrices + 512 * pair) + head)
