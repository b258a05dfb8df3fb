"""Log-likelihoods: equal to transformers' for autoregressive models, and a converging estimate for diffusion."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from runtime import Engine
from sharding.errors import InputError
from tests import golden_cases
from tests.runtime.decoding.test_autoregressive import torch_model

PAIRS = [([5, 9, 3], [7, 1]), ([4], [8, 2, 6, 11]), ([1] * 9, [3])]


def test_autoregressive_is_that_of_transformers(tmp_path: Path) -> None:
    model = torch_model("qwen2")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        greedy = model.generate(torch.tensor([[5, 9, 3]]), max_new_tokens=3, do_sample=False)[0, 3:].tolist()
    pairs = [*PAIRS, ([5, 9, 3], greedy)]
    found = Engine.load(tmp_path, "tensor=1").log_likelihoods(pairs)
    for (context, new), (value, is_greedy) in zip(pairs, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *new]])).logits[0].log_softmax(-1)
        expected = sum(float(logits[len(context) - 1 + place, token]) for place, token in enumerate(new))
        assert value == pytest.approx(expected, abs=1e-4)
        assert is_greedy == (new == greedy)


def test_the_estimate_converges_and_depends_on_the_pair_alone() -> None:
    engine = golden_cases.engine_as_released("tensor=1")
    mask = engine.config.mask_token_id
    # With a single token and an end token, only the token can be masked, so the estimate's mean is its log-probability.
    pair = ([5, 9, 3], [7, 2])
    expected = float(engine.score([[5, 9, 3, mask, 2]], [[5, 9, 3, 7, 2]])[0, 3])
    (found,) = engine.estimate_log_likelihoods([pair], samples=2048)
    assert found == pytest.approx(expected, rel=0.02)
    # With few samples, the estimate is the log-probability times the mean of the weights of these samples.
    (found,) = engine.estimate_log_likelihoods([pair], samples=16, seed=3)
    generator = np.random.default_rng([3, 3, 5, 9, 3, 7, 2])
    share = 1e-3 + (1 - 1e-3) * ((generator.random() + np.arange(16) / 16) % 1)
    masked = generator.random((16, 5))[:, 3] < share
    assert 0 < masked.sum() < 16
    assert found == pytest.approx(expected * (masked / share).mean(), rel=1e-4)
    more = [(context, new) for context, new in PAIRS if len(new) > 1]
    one = engine.estimate_log_likelihoods([pair, *more], samples=16, seed=3)
    other = engine.estimate_log_likelihoods([*more[::-1], pair], samples=16, seed=3)
    np.testing.assert_allclose(one, other[::-1], rtol=1e-5)
    assert engine.estimate_log_likelihoods([pair], samples=16, seed=4)[0] != one[0]


def test_what_cannot_be_scored() -> None:
    engine = golden_cases.engine("tensor=1")
    with pytest.raises(InputError, match="pair 0: context and continuation"):
        engine.estimate_log_likelihoods([([], [1])])
    with pytest.raises(InputError, match="pair 1: the continuation has one token; expected at least 2"):
        engine.estimate_log_likelihoods([([1], [1, 2]), ([1], [1])])
    with pytest.raises(InputError, match="the model allows"):
        engine.estimate_log_likelihoods([([1] * engine.config.max_positions, [1, 2])])
    with pytest.raises(InputError, match="autoregressive"):
        engine.log_likelihoods(PAIRS)
