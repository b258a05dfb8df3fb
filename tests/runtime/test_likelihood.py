"""Log-likelihoods: those of transformers for autoregressive models, an estimate that converges for diffusion."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from runtime import Engine
from runtime.likelihood import estimate_log_likelihoods, log_likelihoods
from sharding.errors import InputError
from tests import golden_cases
from tests.runtime.test_autoregressive import torch_model

PAIRS = [([5, 9, 3], [7, 1]), ([4], [8, 2, 6, 11]), ([1] * 9, [3])]


def test_autoregressive_is_that_of_transformers(tmp_path: Path) -> None:
    model = torch_model("qwen2")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        greedy = model.generate(torch.tensor([[5, 9, 3]]), max_new_tokens=3, do_sample=False)[0, 3:].tolist()
    pairs = [*PAIRS, ([5, 9, 3], greedy)]
    found = log_likelihoods(Engine.load(tmp_path, "tensor=1"), pairs)
    for (context, new), (value, is_greedy) in zip(pairs, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *new]])).logits[0].log_softmax(-1)
        expected = sum(float(logits[len(context) - 1 + place, token]) for place, token in enumerate(new))
        assert value == pytest.approx(expected, abs=1e-4)
        assert is_greedy == (new == greedy)


def test_the_estimate_converges_and_depends_on_the_pair_alone() -> None:
    engine = golden_cases.engine("tensor=1")
    mask = engine.config.mask_token_id
    # Of a token and the end, the token alone can be masked, and its expected estimate is its log-probability.
    pair = ([5, 9, 3], [7, 2])
    expected = float(engine.score([[5, 9, 3, mask, 2]], [[5, 9, 3, 7, 2]])[0, 3])
    (found,) = estimate_log_likelihoods(engine, [pair], samples=2048)
    assert found == pytest.approx(expected, rel=0.15)
    one = estimate_log_likelihoods(engine, [pair, *PAIRS], samples=16, seed=3)
    other = estimate_log_likelihoods(engine, [*PAIRS[::-1], pair], samples=16, seed=3)
    np.testing.assert_allclose(one, other[::-1], rtol=1e-5)
    assert estimate_log_likelihoods(engine, [pair], samples=16, seed=4)[0] != one[0]


def test_what_cannot_be_scored() -> None:
    engine = golden_cases.engine("tensor=1")
    with pytest.raises(InputError, match="pair 0: context and continuation"):
        estimate_log_likelihoods(engine, [([], [1])])
    with pytest.raises(InputError, match="the model allows"):
        estimate_log_likelihoods(engine, [([1] * engine.config.max_positions, [1])])
    with pytest.raises(InputError, match="autoregressive"):
        log_likelihoods(engine, PAIRS)
