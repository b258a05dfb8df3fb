"""Programs of block diffusion: how many are compiled, and runs with replaced or quantized weights and caches."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from runtime import DiffusionConfig, Engine, RowRequest
from runtime.decoding.block_schedule import block_schedule, window_widths
from runtime.execution.slot_kinds import DiffusionSlots
from sharding.errors import InputError
from tests import golden_cases
from tests.runtime.decoding.block_rows import BASE, BLOCK, MESHES, mode, ragged_rows, same


@pytest.mark.slow
@pytest.mark.parametrize(("number", "quantize"), [(1, "int8"), (2, "int8"), (1, "int4"), (2, "int4")])
def test_small_weights_on_a_mesh(number: int, quantize: str) -> None:
    ids, mask = ragged_rows()
    found = [
        Engine.load(golden_cases.FOLDER, mesh, quantize=quantize).generate_tokens(ids, mask, mode(number))
        for mesh in ("tensor=1", MESHES[0], MESHES[-1])
    ]
    same(found[1], found[0])
    same(found[2], found[0])


@pytest.mark.slow
def test_a_small_cache_on_a_mesh() -> None:
    config = BASE.replace(block_length=BLOCK, cache="dual", temperature=0.0)
    ids, mask = ragged_rows()
    found = [
        Engine.load(golden_cases.FOLDER, mesh, "float32", kv_cache="int8").generate_tokens(ids, mask, config)
        for mesh in ("tensor=1", MESHES[-1])
    ]
    same(found[1], found[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"cache": "dual", "parallel": "threshold", "threshold": 0.2, "refresh_blocks": 2},
        pytest.param({"cache": "prefix", "refresh_blocks": 0}, marks=pytest.mark.slow),
        pytest.param({"cache": "dual", "refresh_blocks": 0, "refresh_interval": 3}, marks=pytest.mark.slow),
        pytest.param({"cache": "dual", "algorithm": "origin", "steps": 60}, marks=pytest.mark.slow),
        pytest.param({"cache": "dual", "suffix_window": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_steps_that_follow_one_another_are_steps_alone(changes: dict[str, Any]) -> None:
    """The loop over windows runs several steps. They leave the state that runs of a single step leave."""
    engine = golden_cases.engine("data=2")
    config = BASE.replace(block_length=BLOCK, **changes)
    ids, mask = ragged_rows()
    rows = {
        number: RowRequest(own[shown == 1].tolist(), config, number)
        for number, (own, shown) in enumerate(zip(ids, mask, strict=True))
    }
    width = engine.runner.bucket(max(one.canvas_length for one in rows.values()))
    together, alone = (DiffusionSlots(engine.runner, config, width, len(rows)) for _ in range(2))
    together.insert(rows)
    alone.insert(rows)
    for iterations in (1, 5, None):
        together.run(iterations)
        # Rows that are done make no step, and do not count.
        for _ in range(together.iterations - alone.iterations):
            alone.run(1)
        for found, expected in zip(jax.tree.leaves(together.state), jax.tree.leaves(alone.state), strict=True):
            if found.ndim:  # all but the count of iterations, which each run begins anew
                np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    assert together.state.done[: len(rows)].all()
    assert together.iterations == alone.iterations > 12


def test_no_program_is_compiled_twice() -> None:
    engine = golden_cases.engine("tensor=1")
    config = BASE.replace(block_length=BLOCK, cache="dual", parallel="threshold")
    ids, mask = ragged_rows()
    engine.generate_tokens(ids, mask, config)
    for width, changes in (
        (11, {"threshold": 0.4}),
        (8, {"max_new_tokens": 9, "seed": 8}),
        (5, {"stop_token_ids": [3]}),
    ):
        found = engine.generate_tokens(ids[:, -width:], np.ones_like(ids[:, -width:]), config.replace(**changes))
        assert found.stats.compiled_programs == 0


@pytest.mark.parametrize("cache", ["none", "dual", pytest.param("prefix", marks=pytest.mark.slow)])
def test_lengths_and_schedules_of_a_bucket_share_a_program(cache: str) -> None:
    engine = golden_cases.engine("tensor=1")
    config = BASE.replace(cache=cache, block_length=BLOCK)
    counts = []
    for prompt, new in ((40, 20), (36, 17), (33, 31), (45, 18)):  # masks of a prefix have buckets too
        ids = np.random.default_rng(new).integers(0, 256, (1, prompt), np.int32)
        found = engine.generate_tokens(ids, None, config.replace(max_new_tokens=new, steps=new))
        counts.append(found.stats.compiled_programs)
    assert counts[0] <= 1
    assert counts[1:] == [0, 0, 0]


def test_weights_are_replaced_without_compiling() -> None:
    own = Engine.load(golden_cases.FOLDER, "data=2,sequence=2,tensor=2")
    config = BASE.replace(block_length=BLOCK, cache="dual")
    ids, mask = ragged_rows()
    before = own.generate_tokens(ids, mask, config)
    scaled = jax.tree.map(lambda leaf: np.asarray(leaf) * np.float32(1.1), own.weights)
    fresh = Engine(own.layout, jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), scaled, own.weights))
    expected, old = fresh.generate_tokens(ids, mask, config), own.weights
    own.replace_weights(scaled)
    found = own.generate_tokens(ids, mask, config)
    assert found.stats.compiled_programs == 0
    same(found, expected)
    assert (found.sequences != before.sequences).any()
    # A trainer's weights may have another dtype.
    own.replace_weights(jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float64), old))
    same(own.generate_tokens(ids, mask, config), before)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_weights_of_a_quantized_engine_are_replaced_by_plain_ones(quantize: str) -> None:
    own = Engine.load(golden_cases.FOLDER, "tensor=2", quantize=quantize)
    plain = Engine.load(golden_cases.FOLDER, "tensor=2")
    config = BASE.replace(block_length=BLOCK, cache="dual")
    ids, mask = ragged_rows()
    before = own.generate_tokens(ids, mask, config)
    other = Engine.random(own.config, "tensor=2", quantize=quantize)
    for weights in (plain.weights, jax.tree.map(np.asarray, own.weights)):
        own.replace_weights(other.weights)
        own.replace_weights(weights)
        found = own.generate_tokens(ids, mask, config)
        assert found.stats.compiled_programs == 0
        same(found, before)
    with pytest.raises(InputError, match="is Quantized; expected float32"):
        plain.replace_weights(own.weights)
    with pytest.raises(InputError, match="expected a checkpoint, or a"):
        plain.replace_weights({"layers": 1})


def test_the_schedule_of_blocks() -> None:
    assert block_schedule(DiffusionConfig(max_new_tokens=64, steps=64), 128) == (128, 64)
    assert block_schedule(DiffusionConfig(max_new_tokens=64, steps=64, cache="dual"), 128) == (32, 32)
    assert block_schedule(DiffusionConfig(max_new_tokens=64, steps=32, block_length=16), 128) == (16, 8)
    assert block_schedule(DiffusionConfig(max_new_tokens=64, steps=2, block_length=16), 128) == (16, 1)
    assert block_schedule(DiffusionConfig(max_new_tokens=64, parallel="factor", block_length=16), 128) == (16, 16)
    assert window_widths("dual", 32, 256, offset=1) == (33,)
    assert window_widths("dual", 32, 256, refresh_blocks=0, offset=1) == (65, 33)
    assert window_widths("prefix", 32, 256, offset=1) == (257, 129, 65)
    assert window_widths("none", 32, 256, offset=1) == ()
    assert window_widths("dual", 32, 256, offset=0) == (32,), (
        "a model without a shift needs no position before the block"
    )
