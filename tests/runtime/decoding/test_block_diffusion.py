"""Block diffusion: equal to exact decoding where it must be, and independent of the mesh and the batch in every mode.

The reference is exact decoding. It must equal one block, and a cache that is refreshed in every step.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runtime import Engine
from runtime.execution.cache_programs import lower_empty_cache
from runtime.execution.canvas import pad_after_end
from runtime.execution.rows import stop_rows
from runtime.models.cached import fill_rows, run_window
from runtime.models.dream import DREAM
from runtime.models.kv_cache import KVCache
from runtime.models.transformer import project_logits
from sharding.errors import InputError
from tests import golden_cases
from tests.runtime.decoding.block_rows import (
    BASE,
    BLOCK,
    LENGTHS,
    MESHES,
    MODES,
    NEW_TOKENS,
    generate,
    generate_samples,
    mode,
    on_one_device,
    ragged_rows,
    same,
)

EVERYTHING = 10**5


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(name, marks=() if name == "entropy" else pytest.mark.slow) for name in DREAM.algorithms],
)
def test_a_block_as_long_as_the_canvas_is_decoding_without_blocks(algorithm: str) -> None:
    for changes in ({}, {"steps": 9, "temperature": 0.0}, {"top_p": 0.8, "top_k": 20, "alg_temp": 0.5}):
        config = BASE.replace(algorithm=algorithm, **changes)
        exact = generate("tensor=1", config, history=True)
        found = generate("tensor=1", config.replace(block_length=EVERYTHING), history=True)
        same(found, exact)
        assert found.history is not None
        np.testing.assert_array_equal(found.history, exact.history)


@pytest.mark.parametrize(
    ("cache", "algorithm", "parallel"),
    [
        ("dual", "entropy", "none"),
        ("prefix", "maskgit_plus", "threshold"),
        pytest.param("prefix", "entropy", "none", marks=pytest.mark.slow),
        pytest.param("dual", "maskgit_plus", "threshold", marks=pytest.mark.slow),
        pytest.param("dual", "origin", "none", marks=pytest.mark.slow),
        pytest.param("prefix", "origin", "none", marks=pytest.mark.slow),
        pytest.param("dual", "topk_margin", "factor", marks=pytest.mark.slow),
        pytest.param("prefix", "topk_margin", "factor", marks=pytest.mark.slow),
    ],
)
def test_a_refresh_in_every_step_is_no_cache(cache: str, algorithm: str, parallel: str) -> None:
    config = BASE.replace(algorithm=algorithm, parallel=parallel, block_length=BLOCK)
    if parallel == "threshold":
        config = config.replace(threshold=0.3)
    exact = generate("tensor=1", config)
    found = generate("tensor=1", config.replace(cache=cache, refresh_interval=1, refresh_blocks=0))
    same(found, exact)
    assert found.stats.positions == exact.stats.positions
    stale = generate("tensor=1", config.replace(cache=cache))
    if cache == "dual":  # the windows of a prefix are rounded up, and these canvases are short
        assert stale.stats.positions < exact.stats.positions
    assert (stale.sequences != exact.sequences).any(), "a stale cache that changes no token is probably not used"


# The default run covers one mode per mesh; the slow tests cover every mode on every mesh.
GRID = [
    pytest.param(number, mesh, marks=() if (number, place) == (2, 3) else pytest.mark.slow)
    for (number, (place, mesh)) in itertools.product(range(len(MODES)), enumerate(MESHES))
]


@pytest.mark.parametrize(("number", "mesh"), GRID)
def test_every_mode_on_every_mesh(number: int, mesh: str) -> None:
    found, expected = generate(mesh, mode(number)), on_one_device(number)
    same(found, expected)
    assert found.stats.positions == expected.stats.positions
    np.testing.assert_allclose(found.log_probabilities, expected.log_probabilities, atol=1e-4)


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=() if number in (1, 2) else pytest.mark.slow) for number in range(len(MODES))],
)
def test_a_row_is_itself_alone(number: int) -> None:
    together = on_one_device(number)
    ids, _ = ragged_rows()
    for row, length in enumerate(LENGTHS):
        alone = golden_cases.engine("tensor=1").generate_tokens(
            ids[row : row + 1, max(LENGTHS) - length :], None, mode(number).replace(seed=[together.seeds[row]])
        )
        np.testing.assert_array_equal(alone.sequences[0], together.sequences[row, max(LENGTHS) - length :])


@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_streamed_is_whole(number: int) -> None:
    ids, mask = ragged_rows()
    canvases = [canvas for _, canvas in golden_cases.engine("tensor=1").stream_tokens(ids, mask, mode(number), every=3)]
    np.testing.assert_array_equal(canvases[-1], on_one_device(number).sequences)
    for earlier, later in itertools.pairwise(canvases):  # committed tokens stay
        kept = earlier != golden_cases.engine("tensor=1").config.mask_token_id
        np.testing.assert_array_equal(earlier[kept], later[kept])


def test_blocks_entered_without_a_refresh() -> None:
    """Checked by hand: one refresh, then windows; the first window of a block also covers the previous block."""
    engine, runner = golden_cases.engine("tensor=1"), golden_cases.engine("tensor=1").runner
    ids, _ = ragged_rows()
    prompt, mask_token = ids[1, -LENGTHS[1] :], engine.config.mask_token_id
    length, width = LENGTHS[1] + NEW_TOKENS, runner.bucket(LENGTHS[1] + NEW_TOKENS)
    forward, lengths = runner.forward(width), jnp.array([length])
    canvas = np.zeros((1, width), np.int32)
    canvas[0, :length] = [*prompt, *[mask_token] * NEW_TOKENS]
    cache = lower_empty_cache(engine.layout, 1, width, jnp.float32).compile()()
    common = (forward, engine.weights)

    @jax.jit
    def refresh(cache: KVCache, canvas: jax.Array) -> tuple[jax.Array, KVCache]:
        hidden, cache = fill_rows(*common, cache, canvas, lengths, jnp.zeros(1, jnp.int32))
        return jax.nn.softmax(project_logits(forward.window, engine.weights, hidden)), cache

    @jax.jit
    def window(cache: KVCache, tokens: jax.Array, first: jax.Array) -> tuple[jax.Array, KVCache]:
        hidden, cache = run_window(*common, cache, tokens, first[None], lengths)
        return jax.nn.softmax(project_logits(forward.window, engine.weights, hidden)), cache

    positions = 0
    for number, start in enumerate(range(LENGTHS[1], length, BLOCK)):
        stop, first_step = min(start + BLOCK, length), True
        while (canvas[0, start:stop] == mask_token).any():
            first = 0 if number == 0 and first_step else start - 1 - BLOCK * first_step
            if first == 0:
                made, cache = refresh(cache, jnp.array(canvas))
                positions += length
            else:
                made, cache = window(cache, jnp.array(canvas[:, first:stop]), jnp.int32(first))
                positions += 1 + BLOCK * (1 + first_step)  # part of the last window is beyond the row
            probabilities = np.asarray(made[0, start - 1 - first : stop - 1 - first])
            masked = canvas[0, start:stop] == mask_token
            certainty = np.where(masked, probabilities.max(axis=-1), -1.0)
            surest = masked.argmax() if first_step else certainty.argmax()
            kept = (certainty > 0.2) | (np.arange(stop - start) == surest)
            canvas[0, start:stop] = np.where(kept & masked, probabilities.argmax(axis=-1), canvas[0, start:stop])
            first_step = False
    config = mode(2).replace(temperature=0.0, refresh_blocks=0, stop_token_ids=())
    found = engine.generate_tokens(prompt[None], None, config)
    np.testing.assert_array_equal(found.sequences[0], canvas[0, :length])
    assert found.stats.positions == positions
    often = engine.generate_tokens(prompt[None], None, config.replace(refresh_blocks=1))
    assert positions < often.stats.positions
    assert (often.sequences != found.sequences).any(), "a refresh that changes no token probably does not run"


def test_samples_of_a_prompt_share_their_first_refresh() -> None:
    config, samples = mode(2).replace(refresh_blocks=1), 3
    found = generate_samples("tensor=1", config, samples)
    positions = 0
    for row, length in enumerate(LENGTHS):
        own = slice(row * samples, row * samples + samples)
        seeds = found.seeds[own]
        for place, seed in enumerate(seeds):
            alone = generate("tensor=1", config.replace(seed=[seed]), rows=slice(row, row + 1))
            np.testing.assert_array_equal(alone.sequences[0], found.sequences[own][place])
            positions += alone.stats.positions
        assert (np.ptp(found.sequences[own], axis=0) > 0).any(), "all samples are equal"
        positions -= (samples - 1) * (length + NEW_TOKENS)
    assert found.stats.positions == positions


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_shared_refreshes_on_every_mesh(mesh: str) -> None:
    expected, found = (generate_samples(where, mode(2), 3) for where in ("tensor=1", mesh))
    same(found, expected)
    assert found.stats.positions == expected.stats.positions


def test_blocks_are_filled_in_order() -> None:
    config = BASE.replace(block_length=BLOCK, cache="dual")
    found = generate("tensor=1", config, rows=slice(1, 3))
    steps = found.commit_steps[:, max(LENGTHS) :]
    for start in range(0, NEW_TOKENS - BLOCK, BLOCK):
        assert steps[:, start : start + BLOCK].max() < steps[:, start + BLOCK :].min()


def test_threshold_bounds() -> None:
    config = BASE.replace(block_length=BLOCK, parallel="threshold", algorithm="maskgit_plus")
    one_at_a_time = generate("tensor=1", config.replace(threshold=1.0), rows=slice(1, 2))
    assert one_at_a_time.stats.forwards == one_at_a_time.stats.tokens == NEW_TOKENS
    at_once = generate("tensor=1", config.replace(threshold=0.0), rows=slice(1, 2))
    assert at_once.stats.forwards == -(-NEW_TOKENS // BLOCK)


def test_factor_commits_as_many_as_it_says() -> None:
    """Checked by hand from the first step's logits: c_n >= 1 - factor / (n + 1), and the block's first position."""
    engine = golden_cases.engine("tensor=1")
    ids, _ = ragged_rows()
    prompt = ids[1:2, -LENGTHS[1] :]
    for factor in (0.5, 1.5, 2.0, 4.0):
        config = BASE.replace(
            block_length=BLOCK, parallel="factor", factor=factor, algorithm="maskgit_plus", temperature=0.0
        )
        steps = engine.generate_tokens(prompt, None, config).commit_steps[0, LENGTHS[1] :]
        start = np.concatenate([prompt, np.full((1, NEW_TOKENS), engine.config.mask_token_id)], axis=1)
        logits = engine.logits(start)[0, LENGTHS[1] - 1 : LENGTHS[1] - 1 + BLOCK].astype(np.float64)
        probabilities = np.exp(logits - logits.max(axis=-1, keepdims=True))
        certainty = (probabilities / probabilities.sum(axis=-1, keepdims=True)).max(axis=-1)
        order = np.argsort(-certainty)
        count = int((certainty[order] >= 1 - factor / (np.arange(1, BLOCK + 1) + 1)).sum())
        assert set(np.flatnonzero(steps == 0).tolist()) == {0, *order[:count].tolist()}


def test_a_block_begins_with_its_first_position() -> None:
    config = BASE.replace(block_length=BLOCK, parallel="threshold", threshold=1.0, algorithm="maskgit_plus")
    for cache in ("none", "dual"):
        steps = generate("tensor=1", config.replace(cache=cache), rows=slice(1, 2)).commit_steps[0, -NEW_TOKENS:]
        for start in range(0, NEW_TOKENS, BLOCK):
            own = steps[start : start + BLOCK]
            assert own[0] == own.min()
            assert (own.argsort() != np.arange(len(own))).any(), "then the most certain, wherever it is"


def test_a_row_ends_with_its_stop_token() -> None:
    config = BASE.replace(block_length=BLOCK, cache="dual")
    whole = generate("tensor=1", config)
    new = whole.sequences[:, max(LENGTHS) :]
    stop = int(new[1, 7])
    found = generate("tensor=1", config.replace(stop_token_ids=[stop]))
    pad = golden_cases.engine("tensor=1").config.pad_token_id
    for row in range(len(LENGTHS)):
        own = found.sequences[row, max(LENGTHS) :]
        ends = np.flatnonzero(new[row] == stop)
        if not ends.size:
            np.testing.assert_array_equal(own, new[row])
            continue
        np.testing.assert_array_equal(own[: ends[0] + 1], new[row, : ends[0] + 1])
        left = found.commit_steps[row, max(LENGTHS) :] < 0
        assert (own[left] == pad).all()
    assert found.stats.positions < whole.stats.positions
    assert found.stats.masks_left == 0
    # The last canvas of the history equals the result.
    with_history = generate("tensor=1", config.replace(stop_token_ids=[stop]), history=True)
    assert with_history.history is not None
    np.testing.assert_array_equal(with_history.history[-1], found.sequences)


def test_masks_that_the_model_chose_are_left() -> None:
    """Padding replaces only masks after a stop token; a mask token that the model predicted stays."""
    model = golden_cases.engine("tensor=1").config
    mask, pad, stop = model.mask_token_id, model.pad_token_id, 7
    canvas = np.array([[1, mask, 2, mask], [1, stop, mask, mask], [1, mask, stop, mask], [stop, 2, mask, 3]])
    committed = np.array([[-1, -1, 3, -1], [-1, 4, -1, -1], [-1, -1, 5, -1], [-1, 0, -1, 1]])
    prompts = np.array([1, 1, 1, 1])
    found = pad_after_end(canvas, committed, prompts, stop_rows([stop], 4), model)
    expected = [[1, mask, 2, mask], [1, stop, pad, pad], [1, mask, stop, mask], [stop, 2, mask, 3]]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(pad_after_end(canvas, committed, prompts, stop_rows([], 4), model), canvas)


def test_histories_of_batches_with_more_and_fewer_steps() -> None:
    """A batch with masks in a prompt has more blocks than the next batch."""
    loaded = golden_cases.engine("tensor=1")
    own = Engine(loaded.layout, loaded.weights, max_batch=1)
    ids, mask = ragged_rows()
    seen: list[tuple[int, int]] = []
    found = own.generate_tokens(
        ids,
        mask,
        BASE.replace(block_length=2),
        history=True,
        progress=lambda done, steps: seen.append((done, steps)),
    )
    alone = [
        own.generate_tokens(ids[[row]], mask[[row]], BASE.replace(block_length=2, seed=[seed]), history=True)
        for row, seed in enumerate(found.seeds)
    ]
    steps = [one.stats.steps for one in alone]
    assert len(set(steps)) > 1, "the rows must differ"
    assert found.stats.steps == max(steps)
    assert found.history is not None
    for row, one in enumerate(alone):
        assert one.history is not None
        np.testing.assert_array_equal(found.history[: steps[row], row], one.history[:, 0])
        assert (found.history[steps[row] :, row] == one.sequences[0]).all()
    assert seen == sorted(seen, key=lambda pair: pair[0])
    # Rows use slots one after another, each with at most as many steps as the longest row.
    assert seen[-1] == (max(steps) * len(steps), max(steps) * len(steps))


@pytest.mark.slow
def test_a_prompt_is_filled_in_with_a_cache() -> None:
    ids, _ = ragged_rows()
    ids = np.where(np.arange(ids.shape[1]) % 3 == 1, golden_cases.engine("tensor=1").config.mask_token_id, ids)
    config = BASE.replace(max_new_tokens=0, block_length=4, steps=8)
    exact = golden_cases.engine("tensor=1").generate_tokens(ids, None, config)
    for mesh, cache in (("tensor=1", "dual"), ("tensor=4", "prefix")):
        refreshed = config.replace(cache=cache, refresh_interval=1)
        same(golden_cases.engine(mesh).generate_tokens(ids, None, refreshed), exact)
        stale = golden_cases.engine(mesh).generate_tokens(ids, None, config.replace(cache=cache))
        assert stale.stats.masks_left == 0
        known = ids != golden_cases.engine("tensor=1").config.mask_token_id
        np.testing.assert_array_equal(stale.sequences[known], ids[known])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cache": "both"}, "dual"),
        ({"parallel": "yes"}, "threshold"),
        ({"block_length": 0}, "block_length"),
        ({"refresh_interval": 4}, "cache"),
        ({"refresh_blocks": 2}, "cache"),
        ({"refresh_blocks": -1, "cache": "dual"}, "refresh_blocks"),
        ({"threshold": 1.5, "parallel": "threshold"}, "threshold"),
        ({"threshold": 0.5}, "threshold requires parallel=threshold"),
        ({"factor": 2.0, "parallel": "threshold"}, "factor requires parallel=factor"),
        ({"factor": -1.0, "parallel": "factor"}, "factor"),
        ({"parallel": "threshold", "alg_temp": 0.5}, "alg_temp"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_requests_that_cannot_be_meant(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        BASE.replace(**changes)
