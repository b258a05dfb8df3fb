"""Fast-dLLM v2: the exact cache with a shift, sub-blocks, and bugs of the original."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from runtime import DiffusionConfig, Engine, PoolShape, RowRequest
from runtime.execution.pool import Pool
from runtime.execution.rows import with_model_blocks
from runtime.execution.step_plan import BucketPlan, Insertion, PoolPlan
from runtime.models.config import ConfigError
from runtime.models.families import parse_config
from runtime.planner.estimate import estimate_workload
from runtime.planner.presets import PRESETS, preset
from runtime.planner.workload import Workload
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology
from tests.checkpoints.small import to_canonical, to_huggingface
from tests.golden_cases import Golden
from tests.golden_cases import engine as golden_engine

GOLDEN = Golden(Path(__file__).parents[2] / "golden" / "fast_dllm_v2_tiny")
BLOCK, MASK = 8, 300


def asked(new: int, **changes: Any) -> DiffusionConfig:
    """Return a configuration with blocks of 8, sub-blocks of 4, and at least one token per step."""
    settings: dict[str, Any] = {
        "algorithm": "maskgit_plus",
        "cache": "exact",
        "parallel": "threshold",
        "threshold": 0.3,
        "block_length": BLOCK,
        "sub_block_length": 4,
        "steps": BLOCK * -(-new // BLOCK),
    }
    return DiffusionConfig(new, **settings | changes)


def engine(mesh: str = "data=1") -> Engine:
    return golden_engine(mesh, GOLDEN.folder)


@functools.cache
def prompts() -> tuple[np.ndarray, np.ndarray]:
    """Rows of 19, 16, 5 and 8 tokens, with padding on the left: two end with a block, one is a block."""
    generator, lengths = np.random.default_rng(5), np.array([19, 16, 5, 8])
    mask = (np.arange(19) >= 19 - lengths[:, None]).astype(np.int32)
    return np.where(mask == 1, generator.integers(0, MASK, mask.shape), 301), mask


def test_the_cache_changes_no_token() -> None:
    """The rows of a ragged batch need different numbers of steps, and a stop token ends one of them."""
    ids, mask = prompts()
    plain = engine().generate_tokens(ids, mask, asked(20, cache="none"))
    stops = (int(plain.sequences[2, 19 + 6]),)
    plain = engine().generate_tokens(ids, mask, asked(20, cache="none", stop_token_ids=stops))
    for mesh in ("data=1", "data=2,sequence=2"):
        cached = engine(mesh).generate_tokens(ids, mask, asked(20, stop_token_ids=stops))
        np.testing.assert_array_equal(cached.sequences, plain.sequences)
        np.testing.assert_array_equal(cached.commit_steps, plain.commit_steps)
        assert cached.stats.positions < plain.stats.positions


@pytest.mark.parametrize("cached", [False, True])
def test_a_row_of_a_batch_gives_the_tokens_of_a_batch_of_one(cached: bool) -> None:
    """Neither padding nor other rows change a row's tokens, or when a sub-block runs alone."""
    ids, mask = prompts()
    config = asked(20, sub_block_cache=cached)
    together = engine().generate_tokens(ids, mask, config)
    for row in range(len(ids)):
        start = int(mask[row].argmax())
        alone = engine().generate_tokens(ids[row : row + 1, start:], config=config)
        np.testing.assert_array_equal(alone.sequences[0], together.sequences[row, start:])


def test_a_mask_that_the_model_predicts_is_tried_again(tmp_path: Path) -> None:
    """If the pass for the first position of a block predicts a mask, the next one reads the same output again.

    At a temperature it draws from it, so that such a block does not keep its masks.
    """
    shutil.copy(GOLDEN.folder / "config.json", tmp_path)
    weights = load_file(GOLDEN.folder / "model.safetensors")
    ids, mask = prompts()
    first = engine().generate_tokens(ids, mask, asked(20)).sequences[:, 19:]
    # The mask token is predicted wherever a frequent token was.
    frequent = int(np.bincount(first[:, ::BLOCK].ravel(), minlength=MASK).argmax())
    weights["lm_head.weight"][MASK] = 1.2 * weights["lm_head.weight"][frequent]
    save_file(weights, tmp_path / "model.safetensors")
    other = Engine.load(tmp_path, "data=1", dtype="float32")
    left = []
    for changes in ({"temperature": 1.0, "suppress_mask": False}, {}, {"threshold": 0.0}):
        plain = other.generate_tokens(ids, mask, asked(20, cache="none", **changes))
        cached = other.generate_tokens(ids, mask, asked(20, **changes))
        np.testing.assert_array_equal(cached.sequences, plain.sequences)
        np.testing.assert_array_equal(cached.commit_steps, plain.commit_steps)
        left.append(plain.stats.masks_left)
    assert left[0] == 0
    assert min(left[1:]) > 0


def test_a_sub_block_run_alone_is_an_approximation_that_computes_less() -> None:
    ids, mask = prompts()
    exact, near = (
        engine().generate_tokens(ids, mask, asked(20, threshold=1.0, sub_block_cache=cached))
        for cached in (False, True)
    )
    assert near.stats.positions < exact.stats.positions
    assert (near.sequences != exact.sequences).any()


def test_a_prompt_of_one_block_stays_in_the_context() -> None:
    """The first new token depends on the prompt, which the original drops from the context by mistake."""
    ids, _ = prompts()
    prompt = ids[3:, -8:]
    found = engine().generate_tokens(prompt, config=asked(9)).sequences[0, 8:]
    assert found[0] == engine().logits(prompt, block_length=BLOCK)[0, -1].argmax()
    other = prompt.copy()
    other[0, :4] = (other[0, :4] + 7) % MASK
    assert (engine().generate_tokens(other, config=asked(9)).sequences[0, 8:] != found).any()


def test_each_row_ends_at_its_own_stop_token() -> None:
    """Rows after the first end too, and all of them may end in their first block; the original fails in both."""
    ids, mask = prompts()
    plain = engine().generate_tokens(ids, mask, asked(20)).sequences[:, 19:]
    for stops, rows in (({plain[2, 2]} - {*plain[0]}, 1), ({*plain[:, 1]}, len(plain))):
        result = engine().generate_tokens(ids, mask, asked(20, stop_token_ids=tuple(map(int, stops))))
        found, steps = result.sequences[:, 19:], result.commit_steps[:, 19:]
        ends = [int(np.isin(tokens, [*stops]).argmax()) + 1 if {*tokens} & stops else 20 for tokens in plain]
        assert sum(end < 20 - BLOCK for end in ends) >= rows
        for row, end in enumerate(ends):
            np.testing.assert_array_equal(found[row, :end], plain[row, :end])
            assert (steps[row, end + BLOCK :] == -1).all(), "no block after that of the stop token"


def test_new_tokens_are_an_exact_limit() -> None:
    ids, mask = prompts()
    longest = engine().generate_tokens(ids, mask, asked(20)).sequences
    for new in (1, 3, 8, 14):
        found = engine().generate_tokens(ids, mask, asked(new))
        np.testing.assert_array_equal(found.sequences, longest[:, : 19 + new])


def test_published_lengths_are_an_exact_limit() -> None:
    """The published number of steps is that of whole blocks, so it does not change what a block decodes."""
    ids, mask = prompts()
    own = engine()
    assert [own.published(max_new_tokens=new).steps for new in (1, 32, 33)] == [32, 32, 64]  # type: ignore[union-attr]
    for changes in ({"temperature": 0.0}, {"temperature": 0.0, "parallel": "none", "threshold": 0.9}):
        longest = own.generate_tokens(ids, mask, own.published(max_new_tokens=40, **changes)).sequences
        for new in (1, 3, 33):
            found = own.generate_tokens(ids, mask, own.published(max_new_tokens=new, **changes)).sequences
            np.testing.assert_array_equal(found, longest[:, : 19 + new])


def test_masks_of_a_prompt_are_filled_with_its_end() -> None:
    ids, mask = prompts()
    holes = ids.copy()
    holes[0, [3, 9, 12]] = holes[1, 11] = MASK
    plain = engine().generate_tokens(holes, mask, asked(4, cache="none"))
    cached = engine().generate_tokens(holes, mask, asked(4))
    np.testing.assert_array_equal(cached.sequences, plain.sequences)
    assert not (plain.sequences == MASK).any()


def test_int8_is_near() -> None:
    ids, mask = GOLDEN.inputs("forward")
    exact = engine().logits(ids, mask)
    found = Engine.load(GOLDEN.folder, "data=1", dtype="float32", quantize="int8").logits(ids, mask)
    assert 0 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.05


def test_there_and_back(tmp_path: Path) -> None:
    canonical = to_canonical(GOLDEN.folder, tmp_path / "canonical")
    exported = load_file(to_huggingface(canonical, tmp_path / "exported") / "model.safetensors")
    original = load_file(GOLDEN.folder / "model.safetensors")
    assert {name: value.tobytes() for name, value in exported.items()} == {
        name: value.tobytes() for name, value in original.items()
    }


def test_the_plan_has_the_published_parameters() -> None:
    workload = Workload(preset("fast_dllm_v2-7b"), batch=8, cache="exact")
    found = estimate_workload(workload, parse_topology("v5e:2x4"), MeshSpec(tensor=8))
    assert found.layout.parameter_count == 7_615_616_512
    assert found.fits


def test_published_settings_and_what_is_refused() -> None:
    raw = {key: value for key, value in PRESETS["fast_dllm_v2-7b"].items() if key not in ("bd_size", "mask_token_id")}
    assert (parse_config(raw).attention_block_length, parse_config(raw).mask_token_id) == (32, 151665)
    published = engine().published(max_new_tokens=8)
    assert isinstance(published, DiffusionConfig)
    assert (published.cache, published.block_length, published.sub_block_length) == ("exact", 32, 8)
    assert (published.parallel, published.threshold, published.temperature) == ("threshold", 0.9, 0.0)
    for change, said in [({"bd_size": "32"}, '"bd_size" is'), ({"use_sliding_window": True}, "use_sliding_window")]:
        with pytest.raises(ConfigError, match=said):
            parse_config(raw | change)


@pytest.mark.parametrize("cache", ["exact", "none"])
def test_the_first_token_of_a_block_is_never_sampled(cache: str) -> None:
    """The original takes the most probable one at any temperature; the other tokens of a block are drawn."""
    ids, mask = prompts()
    config = asked(24, cache=cache, temperature=1.5, parallel="none", threshold=0.9, seed=3)
    found = engine().generate_tokens(ids, mask, config).sequences
    greedy: list[bool] = []
    for row, sequence in enumerate(found):
        own = sequence[mask[row].argmax() :][None]
        best = engine().logits(own, block_length=BLOCK)[0].argmax(axis=-1)
        prompt = int(mask[row].sum())
        for place in range(-(-prompt // BLOCK) * BLOCK, own.shape[1], BLOCK):
            # The output before a block sees nothing of the block.
            assert own[0, place] == best[place - 1]
        greedy += (own[0, prompt:] == best[prompt - 1 : -1]).tolist()
    assert not all(greedy)


def test_filters_change_nothing_at_temperature_0() -> None:
    """Nor any confidence, by which positions are committed, whatever the other rows of the slots are."""
    ids, mask = prompts()
    plain = engine().generate_tokens(ids, mask, asked(20), history=True)
    found = engine().generate_tokens(ids, mask, asked(20, top_p=0.3, top_k=2), history=True)
    np.testing.assert_array_equal(found.history, plain.history)
    config = with_model_blocks(asked(20, top_p=0.3), engine().config)
    rows = [RowRequest(row[own > 0].tolist(), config, 0) for row, own in zip(ids, mask, strict=True)]
    pool = Pool.open(engine().runner, PoolShape(asked(20), 64, len(rows)))
    buckets = [BucketPlan(0, len(rows), 64, list(range(len(rows))), 1000)]
    outcome = pool.execute(PoolPlan(0, [Insertion(number, row) for number, row in enumerate(rows)], buckets))
    for one in outcome.results:
        np.testing.assert_array_equal(one.sequence, plain.sequences[one.number, mask[one.number].argmax() :])
