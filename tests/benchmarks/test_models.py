from __future__ import annotations

import pytest

from benchmarks.models import CAUSAL, SIZES, causal_twin, forward_flops, model_config
from runtime.models.families import model_layout
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


def test_the_causal_twin_has_the_tensors_of_the_diffusion_model() -> None:
    sizes = SIZES["mid-size"]
    config, twin = model_config(sizes, "float32"), causal_twin(model_config(sizes, "float32"))
    assert (config.objective, twin.objective) == ("masked_diffusion", "autoregressive")
    named = [{leaf.name: leaf.shape for leaf in model_layout(one).leaves} for one in (config, twin)]
    assert named[0] == named[1]
    assert twin.mask_token_id == model_config(sizes, "float32", CAUSAL).mask_token_id == -1
