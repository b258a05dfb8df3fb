"""A row's tokens depend only on its prompt, its seed and its decoding parameters.

Ragged, padded, bucketed and split rows are compared step by step with batches of one.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime import Engine
from runtime.execution.rows import MAX_SAMPLES, bucket_length, row_seed
from tests import golden_cases
from tests.divergence import ROUNDING
from tests.runtime.execution.ragged import (
    LENGTHS,
    MASK,
    MODES,
    NEW_TOKENS,
    SEEDS,
    alone,
    ragged_rows,
    real,
    request,
    run,
    start_canvas,
)
from tests.runtime.execution.reference_loop import Step, assert_same_tokens

# ---- rows alone and together ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_ragged_rows_equal_the_rows_alone(mode: str) -> None:
    """Left-padded rows next to a long one, which run in a longer bucket, equal batches of one."""
    engine = golden_cases.engine()
    together = run("data=1", mode)
    assert bucket_length(max(LENGTHS) + NEW_TOKENS) > bucket_length(LENGTHS[2] + NEW_TOKENS) == LENGTHS[2] + NEW_TOKENS
    # Running the long row alone in its bucket needs another program, so only some modes test it.
    rows = range(4) if mode in ("entropy-greedy", "origin-sampled") else range(3)
    for row in rows:
        config = request(mode, seed=[SEEDS[row]])
        own = engine.generate_tokens(alone(row), None, config, history=True)
        assert_same_tokens(
            real(together.history, row), own.history[:, 0], start_canvas(row), engine, config, SEEDS[row]
        )
        np.testing.assert_array_equal(real(together.history, row)[-1], real(together.sequences, row))
        np.testing.assert_array_equal(own.history[-1], own.sequences)


@pytest.mark.parametrize("mode", MODES)
def test_padding_and_prompts_stay_as_they_were(mode: str) -> None:
    ids, mask = ragged_rows()
    result = run("data=1", mode)
    kept = (mask == 0) | (ids != MASK)
    width = ids.shape[1]
    np.testing.assert_array_equal(result.sequences[:, :width][kept], ids[kept])
    for canvas in result.history:
        np.testing.assert_array_equal(canvas[:, :width][kept], ids[kept])
    filled = np.concatenate([~kept, np.ones((4, NEW_TOKENS), bool)], axis=1)
    assert (result.commit_steps[~filled] == -1).all()
    left = (result.sequences == MASK) & filled
    assert (result.commit_steps[left] == -1).all()
    assert (result.commit_steps[filled & ~left] >= 0).all()
    assert result.stats.masks_left == left.sum()
    assert result.stats.tokens == (filled & ~left).sum()


@pytest.mark.parametrize("mode", MODES)
def test_each_row_transfers_its_own_count(mode: str) -> None:
    """The schedule counts each row's own masks; the batch mean would give other counts."""
    config, result = request(mode), run("data=1", mode)
    if config.algorithm == "origin":
        counts = [(real(result.history, row) == MASK).sum(axis=1) for row in range(4)]
        assert len({tuple(count) for count in counts}) == 4, "rows with different seeds transfer different counts"
        return
    times = torch.linspace(1, config.eps, config.steps + 1)
    different = set()
    for row in range(4):
        canvases = [start_canvas(row), *real(result.history, row)]
        for step, (before, after) in enumerate(itertools.pairwise(canvases)):
            masked = int((before == MASK).sum())
            count = int(torch.tensor(float(masked)) * (1 - times[step + 1] / times[step]))
            count = masked if step == config.steps - 1 else count
            committed = int((before != after).sum())
            # Counts are lower only where the model predicts the mask token.
            assert committed <= count
            if committed < count:
                assert MASK in Step(golden_cases.engine(), before, config, SEEDS[row], step).tokens
            different.add((step, committed))
    assert len(different) > config.steps, "the rows never differ in their counts, so this shows nothing"


@pytest.mark.parametrize("mode", ["entropy-greedy", "maskgit_plus-sampled"])
def test_the_order_of_the_rows_is_nothing(mode: str) -> None:
    ids, mask = ragged_rows()
    order = [2, 0, 3, 1]
    config = request(mode, seed=[SEEDS[row] for row in order])
    mixed = golden_cases.engine().generate_tokens(ids[order], mask[order], config)
    np.testing.assert_array_equal(mixed.sequences, run("data=1", mode).sequences[order])


@pytest.mark.parametrize("mode", ["entropy-greedy", "origin-sampled"])
def test_rows_that_do_not_divide_the_data_axis(mode: str) -> None:
    ids, mask = (array[:3] for array in ragged_rows())
    config = request(mode, seed=SEEDS[:3])
    engine = golden_cases.engine("data=2")
    found = engine.generate_tokens(ids, mask, config, history=True)
    assert found.sequences.shape == (3, ids.shape[1] + NEW_TOKENS)
    assert found.history.shape == (config.steps, *found.sequences.shape)
    assert len(found.seeds) == 3
    for row in range(3):
        assert_same_tokens(
            real(found.history, row),
            real(run("data=1", mode).history, row),
            start_canvas(row),
            golden_cases.engine(),
            config,
            SEEDS[row],
        )
    if mode == "entropy-greedy":
        logits = engine.logits(ids, mask)
        assert len(logits) == 3
        np.testing.assert_allclose(logits, golden_cases.engine().logits(ids, mask), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("mesh", ["data=1", "data=2"])
def test_batches_split_for_memory(mesh: str) -> None:
    """Five rows, run two at a time, equal one batch of five. A limit of three is rounded to the data axis of two."""
    golden = golden_cases.engine(mesh)
    ids, mask = ragged_rows()
    order = [2, 1, 0, 2, 1]
    config = request("entropy-sampled", seed=[5, 6, 7, 8, 9])
    most = 2 * golden.layout.spec.data - (mesh == "data=2")
    split = Engine(golden.layout, golden.weights, max_batch=most)
    found = split.generate_tokens(ids[order], mask[order], config, history=True)
    assert found.stats.batches == 3
    assert found.stats.compiled_programs == 1, "the loop: rows that had to wait are inserted through the host"
    assert found.seeds == [5, 6, 7, 8, 9]
    whole = golden.generate_tokens(ids[order], mask[order], config, history=True)
    assert whole.stats.batches == 1
    assert found.stats.forwards > whole.stats.forwards
    assert found.stats.tokens == whole.stats.tokens
    for row, source in enumerate(order):
        cut = slice(max(LENGTHS) - LENGTHS[source], None)
        assert_same_tokens(
            found.history[:, row, cut],
            whole.history[:, row, cut],
            start_canvas(source),
            golden_cases.engine(),
            config,
            config.seed[row],
        )
    np.testing.assert_array_equal(found.sequences[0], found.history[-1][0])


# ---- seeds ------------------------------------------------------------------------------------------------------


def test_one_seed_gives_each_row_its_own() -> None:
    """With one seed for the batch, each row's derived seed reproduces the row, in a batch and alone."""
    engine, prompt = golden_cases.engine(), np.repeat(alone(2), 4, axis=0)
    config = request("entropy-sampled", seed=3)
    result = engine.generate_tokens(prompt, None, config)
    assert result.seeds == [row_seed(3, row) for row in range(4)]
    assert len({row.tobytes() for row in result.sequences}) == 4, "four rows with four seeds, four samples"
    np.testing.assert_array_equal(engine.generate_tokens(prompt, None, config).sequences, result.sequences)
    again = engine.generate_tokens(prompt, None, config.replace(seed=result.seeds))
    np.testing.assert_array_equal(again.sequences, result.sequences)
    for row, seed in enumerate(result.seeds):
        own = engine.generate_tokens(prompt[row : row + 1], None, config.replace(seed=[seed]))
        np.testing.assert_array_equal(own.sequences[0], result.sequences[row])
        assert own.seeds == [seed]
    other = engine.generate_tokens(prompt, None, config.replace(seed=4))
    assert (other.sequences != result.sequences).any(axis=1).all()


def test_equal_seeds_give_equal_rows() -> None:
    result = golden_cases.engine().generate_tokens(
        np.repeat(alone(2), 4, axis=0), None, request("entropy-sampled", seed=[7, 8, 7, 7])
    )
    np.testing.assert_array_equal(result.sequences[[2, 3]], result.sequences[[0, 0]])
    assert (result.sequences[1] != result.sequences[0]).any()


def test_seeds_that_agree_in_their_low_or_high_half_differ() -> None:
    seeds = [1, 1 + (1 << 32), 1 << 32, (1 << 62) + 1]
    result = golden_cases.engine().generate_tokens(
        np.repeat(alone(2), 4, axis=0), None, request("entropy-sampled", seed=seeds)
    )
    assert len({row.tobytes() for row in result.sequences}) == 4


def test_several_samples_of_each_row() -> None:
    """Samples are adjacent, each is reproduced by its own seed, and the first one has the row's seed."""
    engine = golden_cases.engine()
    ids, mask = (array[1:3] for array in ragged_rows())
    config = request("entropy-sampled", seed=[21, 22])
    result = engine.generate_tokens(ids, mask, config, num_return_sequences=2)
    assert result.seeds == [21, row_seed(21, 0, 1), 22, row_seed(22, 0, 1)]
    kept = (mask == 1) & (ids != MASK)
    for row in range(4):
        np.testing.assert_array_equal(
            result.sequences[row, : ids.shape[1]][kept[row // 2]], ids[row // 2][kept[row // 2]]
        )
        source = 1 + row // 2
        own = engine.generate_tokens(alone(source), None, config.replace(seed=[result.seeds[row]]))
        np.testing.assert_array_equal(own.sequences[0], result.sequences[row, max(LENGTHS) - LENGTHS[source] :])
    assert (result.sequences[0] != result.sequences[1]).any()
    single = engine.generate_tokens(ids, mask, config.replace(seed=9), num_return_sequences=2)
    assert single.seeds == [row_seed(9, row, sample) for row in range(2) for sample in range(2)]
    explicit = engine.generate_tokens(ids, mask, config.replace(seed=[1, 2, 3, 4]), num_return_sequences=2)
    assert explicit.seeds == [1, 2, 3, 4]


def test_row_seeds_never_collide() -> None:
    seeds = {row_seed(seed, row, sample) for seed in range(10) for row in range(50) for sample in range(20)}
    assert len(seeds) == 10 * 50 * 20
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    # "1:11:1" and "11:1:1" have different digests.
    assert row_seed(1, 11, 1) != row_seed(11, 1, 1)
    assert MAX_SAMPLES >= 1 << 16


# ---- infilling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["entropy-greedy", "origin-sampled"])
def test_infilling_without_new_tokens(mode: str) -> None:
    """Infilling without new tokens: masks anywhere, even at position 0, a row without masks, and left padding."""
    engine = golden_cases.engine()
    ids, mask = ragged_rows()
    config = request(mode, max_new_tokens=0, steps=4)
    result = engine.generate_tokens(ids, mask, config, history=True)
    assert result.sequences.shape == ids.shape
    np.testing.assert_array_equal(result.history[-1], result.sequences)
    np.testing.assert_array_equal(result.sequences[2], ids[2])
    for row in (0, 1):
        own = engine.generate_tokens(alone(row), None, config.replace(seed=[SEEDS[row]]), history=True)
        start = max(LENGTHS) - LENGTHS[row]
        assert_same_tokens(result.history[:, row, start:], own.history[:, 0], alone(row)[0], engine, config, SEEDS[row])
    if mode == "entropy-greedy":
        # A single mask at position 0 uses its own output as its prediction.
        assert result.sequences[0, -1] == engine.logits([[MASK]])[0, 0].argmax()


def test_the_prediction_for_a_position_is_the_output_before_it() -> None:
    engine = golden_cases.engine()
    prompt = alone(2).copy()
    prompt[0, [0, 10]] = MASK
    result = engine.generate_tokens(prompt, None, request("entropy-greedy", max_new_tokens=0, steps=1, seed=1))
    logits = engine.logits(prompt)[0]
    assert result.sequences[0, 0] == logits[0].argmax()
    assert result.sequences[0, 10] == logits[9].argmax() != logits[10].argmax()


def test_the_golden_rows_have_the_masks_this_needs() -> None:
    config = json.loads((Path(golden_cases.FOLDER) / "config.json").read_text())
    assert config["mask_token_id"] == MASK
    assert golden_cases.engine().config.vocab_size == 320
