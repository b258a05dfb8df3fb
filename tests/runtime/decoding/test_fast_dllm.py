"""Fast-dLLM's block decoder beyond its golden cases: ragged rows, masks in prompts, and predicted mask tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runtime import DiffusionConfig, Engine
from runtime.decoding.sampling import choose_tokens
from sharding.errors import InputError
from tests import golden_cases
from tests.runtime.decoding.block_rows import BLOCK, LENGTHS, NEW_TOKENS, ragged_rows
from tests.runtime.decoding.token_choices import MASK, VOCAB, forward, padded, rule, softmax

THRESHOLD = DiffusionConfig.fast_dllm(NEW_TOKENS, block_length=BLOCK, threshold=0.2)
SCHEDULE = DiffusionConfig.fast_dllm(NEW_TOKENS, block_length=BLOCK, parallel="none", algorithm="entropy", steps=16)


def test_the_preset_has_the_published_settings() -> None:
    config = DiffusionConfig.fast_dllm()
    assert (config.cache, config.block_length, config.parallel, config.threshold) == ("dual", 32, "threshold", 0.9)
    assert (config.block_rule, config.temperature, config.steps) == ("fast_dllm", 0.0, config.max_new_tokens)


@pytest.mark.parametrize("config", [THRESHOLD, SCHEDULE], ids=["threshold", "schedule"])
def test_a_refresh_commits_the_first_mask_of_each_block(config: DiffusionConfig) -> None:
    """In ragged rows too, and in rows with masks in the prompt."""
    engine = golden_cases.engine("tensor=1")
    ids, mask = ragged_rows()
    found = engine.generate_tokens(ids, mask, config)
    assert found.stats.masks_left == 0
    for row, length in enumerate(LENGTHS):
        given = ids[row, -length:]
        canvas = np.concatenate([given, np.full(NEW_TOKENS, engine.config.mask_token_id)])
        steps = found.commit_steps[row, max(LENGTHS) - length :]
        first = int(np.argmax(canvas == engine.config.mask_token_id))
        for start in range(first, len(canvas), BLOCK):
            own = np.flatnonzero(canvas[start : start + BLOCK] == engine.config.mask_token_id)
            committed = steps[start + own]
            assert (committed == committed.min()).sum() == 1
            assert committed.argmin() == 0
        np.testing.assert_array_equal(found.sequences[row, max(LENGTHS) - length :][steps < 0], canvas[steps < 0])


def test_a_step_of_the_schedule_that_commits_nothing_is_a_forward_pass() -> None:
    engine = golden_cases.engine("tensor=1")
    prompt = ragged_rows()[0][1:2, -LENGTHS[1] :]
    config = DiffusionConfig.fast_dllm(16, block_length=8, parallel="none", algorithm="entropy")
    assert engine.generate_tokens(prompt, None, config).stats.forwards == 16
    assert engine.generate_tokens(prompt, None, config.replace(block_rule="default")).stats.forwards < 16


def test_the_best_other_token_replaces_the_mask_token() -> None:
    generator = np.random.default_rng(3)
    logits = generator.normal(0, 2, (2, 4, VOCAB))
    logits[0, 1, MASK] = logits[1, 2, MASK] = logits.max() + 1
    keys = jax.random.split(jax.random.key(0), (2, 4))
    own = rule("maskgit_plus", replace_mask=True)
    arguments = (jnp.array(padded(logits)), keys, jnp.zeros(2), jnp.ones(2), jnp.full(2, VOCAB))
    tokens, confidences = choose_tokens(forward("data=1"), own, *arguments)
    shares = softmax(logits)
    shares[..., MASK] = 0  # but the others do not grow
    np.testing.assert_array_equal(tokens, shares.argmax(axis=-1))
    np.testing.assert_allclose(confidences, shares.max(axis=-1), rtol=1e-5)
    hot = (*arguments[:2], jnp.full(2, 5.0), *arguments[3:])
    warm, _ = choose_tokens(forward("data=1"), replace(own, sampled=True), *hot)
    assert (np.asarray(warm) != MASK).all()
    # Where a filter leaves only the mask token, the best other one of all logits is taken, cold and warm.
    only = (*arguments[:4], jnp.ones(2, jnp.int32)), (*hot[:4], jnp.ones(2, jnp.int32))
    for rules, given in ((replace(own, filtered=True), only[0]), (replace(own, filtered=True, sampled=True), only[1])):
        tokens, confidences = choose_tokens(forward("data=1"), rules, *given)
        np.testing.assert_array_equal(tokens, shares.argmax(axis=-1))
        assert confidences[0, 1] == confidences[1, 2] == 0
    # So far above the others that their probabilities are 0 in float32.
    logits[0, 1, MASK] += 200
    tokens, confidences = choose_tokens(forward("data=1"), own, jnp.array(padded(logits)), *arguments[1:])
    np.testing.assert_array_equal(tokens, shares.argmax(axis=-1))
    assert confidences[0, 1] == 0 < confidences[1, 2]


@pytest.mark.parametrize("config", [THRESHOLD.replace(threshold=0.9), SCHEDULE], ids=["threshold", "schedule"])
def test_a_model_that_predicts_the_mask_token_leaves_none(config: DiffusionConfig) -> None:
    own = Engine.load(golden_cases.FOLDER, "tensor=1", "float32")
    prompt = ragged_rows()[0][1:2, -LENGTHS[1] :]
    default = config.replace(block_rule="default")
    often = int(np.bincount(own.generate_tokens(prompt, None, default).sequences[0, LENGTHS[1] :]).argmax())
    weights = jax.tree.map(np.asarray, own.weights)
    head = np.array(weights.lm_head)
    head[own.config.mask_token_id] = 1.5 * head[often]
    own.replace_weights(weights.replace(lm_head=head))
    assert own.generate_tokens(prompt, None, config).stats.masks_left == 0
    assert own.generate_tokens(prompt, None, default).stats.masks_left > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cache": "none", "block_length": None}, "block_rule requires cache=dual or cache=prefix"),
        ({"parallel": "factor", "threshold": 0.9}, "block_rule requires parallel=none or parallel=threshold"),
        ({"algorithm": "origin"}, "block_rule requires algorithm="),
        ({"refresh_interval": 4}, "refresh_interval requires block_rule=default"),
        ({"refresh_blocks": 2}, "refresh_blocks requires block_rule=default"),
        ({"threshold_decay": 0.5}, "threshold_decay requires block_rule=default"),
        ({"parallel": "none", "threshold": 0.9, "alg_temp": 0.5}, "alg_temp requires block_rule=default"),
    ],
)
def test_settings_that_the_rule_does_not_have(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as found:
        THRESHOLD.replace(**changes)
    assert said in str(found.value)


def test_it_is_for_dream() -> None:
    llada = golden_cases.engine("data=1", golden_cases.FOLDER.parent / "llada_tiny")
    with pytest.raises(InputError, match="block_rule=fast_dllm is not available for llada models"):
        llada.generate_tokens(np.array([[1, 2, 3]]), None, DiffusionConfig.fast_dllm(16, algorithm="low_confidence"))
