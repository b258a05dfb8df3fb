"""Shared by tests of drafts of an autoregressive model: prompts, configurations, and comparisons with no drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from runtime import Engine, GenerationResult, RowRequest, RowResult, SamplingConfig
from runtime.execution.autoregressive_slots import AutoregressiveSlots
from runtime.execution.rows import row_seeds
from tests.divergence import assert_same_cache
from tests.golden_cases import FOLDER

QWEN3 = FOLDER.parent / "qwen3_tiny"
LENGTHS, NEW = (13, 5, 1, 9), 30
GREEDY = SamplingConfig(max_new_tokens=NEW, log_probabilities=True)
SAMPLED = GREEDY.replace(temperature=0.3, top_p=0.9, top_k=40, seed=5)
# So many that rows end early, some of them among the tokens of one pass.
STOPS = tuple(range(0, 320, 16))
CONFIGS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "greedy, stop tokens": GREEDY.replace(stop_token_ids=STOPS),
    "sampled, stop tokens": SAMPLED.replace(stop_token_ids=STOPS),
}
MESHES = ("tensor=2", "data=2", "sequence=2", "data=2,sequence=2,tensor=2")


def ragged() -> tuple[np.ndarray, np.ndarray]:
    """Four prompts; one repeats itself."""
    ids = np.random.default_rng(1).integers(1, 300, (4, max(LENGTHS))).astype(np.int32)
    ids[0] = np.resize([3, 1, 4, 1, 5], len(ids[0]))
    mask = (np.arange(max(LENGTHS)) >= max(LENGTHS) - np.array(LENGTHS)[:, None]).astype(np.int32)
    return ids * mask, mask


def same(found: GenerationResult, expected: GenerationResult, tolerance: float = 1e-4) -> None:
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    np.testing.assert_array_equal(found.commit_steps, expected.commit_steps)
    np.testing.assert_allclose(found.log_probabilities, expected.log_probabilities, atol=tolerance)
    assert found.stats.tokens == expected.stats.tokens


def check(
    own: Engine,
    config: SamplingConfig,
    drafts: int,
    expected: GenerationResult | None = None,
    source: str = "prompt_lookup",
) -> GenerationResult:
    """Check a run with drafts against the same run without, and its counts; return it."""
    ids, mask = ragged()
    if expected is None:
        expected = own.generate_tokens(ids, mask, config)
        assert expected.drafts == []
    found = own.generate_tokens(ids, mask, config.replace(**{source: drafts}))
    same(found, expected)
    passes = [one.passes for one in found.drafts]
    new = (found.commit_steps >= 0).sum(axis=1)
    assert [one.passes + one.accepted for one in found.drafts] == new.tolist()
    assert all(0 <= one.accepted <= drafts * one.passes for one in found.drafts)
    # The first pass reads the prompt, and each of the others computes a window.
    assert found.stats.positions == mask.sum() + (1 + drafts) * (sum(passes) - len(passes))
    # An int8 cache is filled prompt by prompt, any other in one pass.
    prompts = len(passes) if own.runner.cache_dtype == np.int8 else 1
    assert found.stats.forwards == max(passes) - 1 + prompts
    assert found.stats.row_passes == sum(passes)
    assert found.stats.accepted_steps == new.sum() - sum(passes)
    return found


class Ran(NamedTuple):
    """Slots after a pass: tokens ``[B, T]``, lengths ``[B]``, and the cache."""

    tokens: np.ndarray
    lengths: np.ndarray
    cache: Any


def run_slots(own: Engine, config: SamplingConfig) -> list[Ran]:
    """Run the ragged prompts in slots, and return these after each pass."""
    ids, mask = ragged()
    prompts = [row[real > 0].tolist() for row, real in zip(ids, mask, strict=True)]
    width, count = own.runner.bucket(max(LENGTHS) + NEW), len(prompts)
    slots = AutoregressiveSlots(own.runner, config, width, count, max(LENGTHS))
    rows = zip(prompts, row_seeds(config.seed, count), strict=True)
    slots.insert({slot: RowRequest(prompt, config, seed) for slot, (prompt, seed) in enumerate(rows)})
    found: list[Ran] = []
    done = False
    while not done:
        done = bool(slots.run(1).all())
        found.append(Ran(*(np.array(one) for one in (slots.state.tokens, slots.state.lengths)), copied(slots)))
    return found


def copied(slots: AutoregressiveSlots) -> Any:
    return jax.tree.map(lambda leaf: np.array(leaf), slots.state.cache)


def same_entries(found: Any, expected: Any, row: int, length: int) -> bool:
    """Whether the keys and values of a row's first positions are equal in all layers."""
    return all(
        np.array_equal(getattr(one, name)[:, row, :, :length], getattr(other, name)[:, row, :, :length])
        for one, other in zip(found, expected, strict=True)
        for name in ("keys", "values")
    )


def same_caches(own: Engine, config: SamplingConfig, drafted: SamplingConfig) -> None:
    """Check the cache after each pass against that of a run without drafts, up to rounding.

    With an int8 cache, values that are rounded to the other integer may change a token. Without such values, a token
    that differs fails.
    """
    plain = run_slots(own, config)[-1]
    for found in run_slots(own, drafted):
        comparable = []
        for row, length in enumerate(found.lengths):
            differs = found.tokens[row, :length] != plain.tokens[row, :length]
            # The newest token has no keys and values yet; those of a position depend on the tokens up to it.
            comparable.append(int(np.argmax(differs)) if differs.any() else length - 1)
            if differs.any():
                assert not same_entries(found.cache, plain.cache, row, comparable[row]), "a difference without a tie"
        assert_same_cache(found.cache, plain.cache, comparable)


def requests(config: SamplingConfig) -> list[RowRequest]:
    ids, mask = ragged()
    prompts = [row[own > 0].tolist() for row, own in zip(ids, mask, strict=True)] * 3
    return [
        RowRequest(prompt, config.replace(max_new_tokens=10 + 7 * seed), seed) for seed, prompt in enumerate(prompts)
    ]


def gather(own: Engine, asked: Sequence[RowRequest]) -> dict[int, RowResult]:
    return {one.number: one for results in own.scheduler(asked, 3).run() for one in results}


def same_rows(found: RowResult, expected: RowResult) -> None:
    np.testing.assert_array_equal(found.sequence, expected.sequence)
    np.testing.assert_array_equal(found.commit_steps, expected.commit_steps)
    np.testing.assert_allclose(found.log_probabilities, expected.log_probabilities, atol=1e-4)
