"""Rows that move between slots of different shapes before every iteration keep the tokens of a batch of one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runtime import (
    DiffusionConfig,
    Engine,
    Executor,
    PoolShape,
    RequestHandle,
    RowFinished,
    SamplingConfig,
    Scheduler,
    SchedulerPolicy,
    model_layout,
)
from runtime.execution.cache_programs import abstract_taken_row, lower_put_row, lower_take_row
from runtime.execution.row_request import RowRequest, RowResult
from runtime.execution.rows import with_model_blocks
from runtime.execution.runner import PROMPT_CHUNKS, Runner
from runtime.execution.slot_kinds import open_slots
from runtime.execution.slots import Slots
from runtime.execution.specialization import generalized
from runtime.models.kv_cache import abstract_cache
from sharding.aot import aot_devices, missing_compiler
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology
from tests import golden_cases
from tests.runtime.execution.test_offline import alone, autoregressive, prompts, qwen2
from tests.runtime.models.test_dreamon import lively_folder

__all__ = ["qwen2"]

WIDTHS = (32, 64)
BASE = DiffusionConfig(max_new_tokens=12, steps=12, algorithm="entropy", temperature=0.7, log_probabilities=True)
DIFFUSION: dict[str, DiffusionConfig] = {
    "exact": BASE,
    "alg_temp": BASE.replace(alg_temp=0.7, top_p=0.9, top_k=20),
    "origin": BASE.replace(algorithm="origin"),
    "blocks": BASE.replace(block_length=5, stop_token_ids=tuple(range(8))),
    "factor": BASE.replace(algorithm="maskgit_plus", parallel="factor"),
    "dual": BASE.replace(
        cache="dual", block_length=4, parallel="threshold", threshold=0.2, algorithm="maskgit_plus", temperature=0.0
    ),
    "prefix": BASE.replace(cache="prefix", block_length=4, refresh_interval=3),
    "drafts": BASE.replace(draft_steps=2),
    "drafted dual": BASE.replace(cache="dual", block_length=4, refresh_blocks=0, draft_steps=2),
}
# Modes of other families: their golden model, and settings.
FAMILIES: dict[str, tuple[str, DiffusionConfig]] = {
    "guidance": ("llada_tiny", BASE.replace(algorithm="low_confidence", cfg_scale=1.2)),
    "lengths that change": ("dreamon_tiny", BASE),
    "exact cache": ("sdar_tiny", BASE.replace(algorithm="maskgit_plus", cache="exact", block_length=4)),
}
MESHES = ("tensor=1", "data=2", "sequence=2", "tensor=2", "data=2,sequence=2,tensor=2")
EVERYWHERE = [
    pytest.param(mesh, mode, marks=() if (mesh, mode) in fast else pytest.mark.slow)
    for fast in [{("tensor=1", "exact"), ("tensor=1", "dual")}]
    for mesh in MESHES
    for mode in DIFFUSION
]


class Shuffled:
    """Slots of several shapes, between which all rows move before each iteration."""

    def __init__(
        self, runner: Runner, config: DiffusionConfig | SamplingConfig, seed: int, counts: tuple[int, ...]
    ) -> None:
        """Create slots for a configuration, so many per data shard; the seed determines the moves."""
        self._runner, self._config, self._counts = runner, config, counts
        self._random = np.random.default_rng(seed)
        self.moves = 0

    def _free(self, width: int, count: int) -> Slots:
        slots = open_slots(self._runner, self._config, width, count, max(WIDTHS), width)
        slots.copied = max(WIDTHS)
        return slots

    def run(self, requests: list[RowRequest]) -> list[RowResult]:
        data, found = self._runner.layout.spec.data, []
        # The place of each row: slots, and the row in each slot.
        there: list[tuple[Slots, dict[int, int]]] = []
        left = list(range(len(requests)))
        while left:
            there = self._move(requests, left, there, data)
            for slots, rows in there:
                done = slots.run(1, chunks=1)
                over = {slot: rows.pop(slot) for slot in list(rows) if done[slot]}
                found += slots.collect({slot: (row, requests[row]) for slot, row in over.items()})
                left = [row for row in left if row not in over.values()]
        return found

    def _move(
        self, requests: list[RowRequest], left: list[int], old: list[tuple[Slots, dict[int, int]]], data: int
    ) -> list[tuple[Slots, dict[int, int]]]:
        """Put all rows into slots of random shapes: first as requests, later as moved rows."""
        moving = {}
        for slots, rows in old:
            taken = slots.take(list(rows))
            moving |= {row: (taken[slot], slots.take_caches(slot)) for slot, row in rows.items()}
        made = []
        rest = [int(row) for row in self._random.permutation(left)]
        while rest:
            count = data * int(self._random.choice(self._counts))
            own = rest[: int(self._random.integers(1, count + 1))]
            rest = [row for row in rest if row not in own]
            fitting = [width for width in WIDTHS if width >= max(requests[row].length for row in own)]
            slots = self._free(int(self._random.choice(fitting)), count)
            places = dict(zip((int(slot) for slot in self._random.permutation(count)), own, strict=False))
            slots.insert({slot: moving[row][0] if row in moving else requests[row] for slot, row in places.items()})
            for slot, row in places.items():
                if row in moving:
                    slots.put_caches(slot, moving[row][1])
                    self.moves += 1
            made.append((slots, places))
        return made


def one_step_each(config: DiffusionConfig | SamplingConfig, count: int) -> dict[str, int]:
    """Models whose canvas changes its length have no other number of steps."""
    return {"steps": count} if isinstance(config, DiffusionConfig) and config.variable_length else {}


def check(
    engine: Engine, single: Engine, config: DiffusionConfig | SamplingConfig, counts: tuple[int, ...] = (1, 2)
) -> None:
    masked = None if engine.config.objective == "autoregressive" else engine.config.mask_token_id
    rows = prompts(engine.config.vocab_size, masked)[:4]
    new = (12, 5, 25, 20)
    config = with_model_blocks(config, engine.config)
    requests = [
        RowRequest(row, config.replace(max_new_tokens=count, **one_step_each(config, count)), seed=number * 7919)
        for number, (row, count) in enumerate(zip(rows, new, strict=True))
    ]
    shuffled = Shuffled(engine.runner, generalized(config), 5, counts)
    found = shuffled.run(requests)
    assert sorted(one.number for one in found) == list(range(len(requests)))
    assert shuffled.moves > 2 * len(requests)
    for one in found:
        expected = alone(single, requests[one.number])
        np.testing.assert_array_equal(one.sequence, expected.sequence)
        np.testing.assert_array_equal(one.commit_steps, expected.commit_steps)
        assert one.log_probabilities is not None
        assert expected.log_probabilities is not None
        np.testing.assert_allclose(one.log_probabilities, expected.log_probabilities, atol=1e-4)


@pytest.mark.parametrize(("mesh", "mode"), EVERYWHERE)
def test_diffusion_rows_that_move_before_every_iteration(mesh: str, mode: str) -> None:
    check(golden_cases.engine(mesh), golden_cases.engine("tensor=1"), DIFFUSION[mode])


@pytest.mark.slow
@pytest.mark.parametrize("mode", FAMILIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_rows_of_other_families_that_move_before_every_iteration(mesh: str, mode: str, tmp_path: Path) -> None:
    name, config = FAMILIES[mode]
    folder = lively_folder(tmp_path) if name == "dreamon_tiny" else golden_cases.FOLDER.parent / name
    check(golden_cases.engine(mesh, folder), golden_cases.engine("tensor=1", folder), config)


def test_rows_that_move_before_every_iteration_on_a_mesh_with_two_axes() -> None:
    """Runs with every commit, unlike the other meshes: with one number of slots, there are half as many programs."""
    check(golden_cases.engine("sequence=2,tensor=2"), golden_cases.engine("tensor=1"), BASE, counts=(2,))


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        pytest.param(mesh, changes, marks=() if mesh == "tensor=1" and not changes else pytest.mark.slow)
        for mesh in MESHES
        for changes in ({}, {"use_cache": False})
    ],
)
def test_autoregressive_rows_that_move_before_every_token(
    qwen2: str, mesh: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Also between two chunks of a prompt.
    monkeypatch.setitem(PROMPT_CHUNKS, "cpu", 4)
    config = SamplingConfig(temperature=0.8, top_p=0.95, log_probabilities=True, **changes)
    check(autoregressive(qwen2, mesh), autoregressive(qwen2, "tensor=1"), config)


@pytest.mark.parametrize("kind", ["model", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("mesh", "collectives"), [("tensor=2", 0), ("data=2,tensor=2", 1), ("data=2,sequence=2,tensor=2", 1)]
)
def test_a_move_is_one_collective(mesh: str, collectives: int, kind: str) -> None:
    engine = Engine.load(golden_cases.FOLDER, mesh, kv_cache=kind)
    config = generalized(DIFFUSION["dual"])
    slots = open_slots(engine.runner, config, WIDTHS[0], 4, max(WIDTHS), WIDTHS[0])
    slots.copied = max(WIDTHS)
    slots.compile_moves()
    texts = {name: text for name, text in engine.program_texts().items() if name.endswith(("take", "put"))}
    assert len(texts) == 2
    found = {name.partition("_")[2]: re.findall(_COLLECTIVES, text) for name, text in texts.items()}
    assert len(found["take"]) == collectives, found
    assert not found["put"], found


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_a_move_on_a_tpu_slice_is_one_collective(dtype: Any) -> None:
    if missing_compiler("tpu") is not None:
        pytest.skip("no compiler for TPUs")
    config = golden_cases.engine("tensor=1").config
    layout = model_layout(config, MeshSpec(data=2, sequence=2, tensor=2), aot_devices(parse_topology("v5e:2x4")))
    cache, taken = abstract_cache(layout, 4, 256, dtype), abstract_taken_row(layout, 512, dtype)
    row: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.replicated)
    take = lower_take_row(layout, 512, cache, row).compile().as_text()
    assert len(re.findall(_COLLECTIVES, take)) == 1
    put: Any = lower_put_row(layout, cache, row, taken).compile().as_text()  # type: ignore[arg-type]
    assert not re.findall(_COLLECTIVES, put)


def test_a_cache_is_cleared_by_a_program_for_moves() -> None:
    """A row with non-finite logits leaves a bucket narrower than the canvas, and another row takes its slot."""
    engine, config = Engine.load(golden_cases.FOLDER, "tensor=1"), generalized(DIFFUSION["dual"])
    weights, bad = jax.tree.map(np.array, engine.weights), 9
    weights.embedding[bad] = np.nan
    engine.replace_weights(weights)
    executor = Executor(engine.runner, [PoolShape(config, max(WIDTHS), 2)])
    (pool,) = executor.pools
    narrow = next(one for one in pool.grid.buckets if (one.rows, one.width) == (2, min(WIDTHS)))
    pool.compile(narrow)
    before = engine.compiled_programs
    scheduler = Scheduler([pool.limits], SchedulerPolicy(1))
    scheduler.restrict(0, [narrow])
    for tokens in ([1, 2, 3], [1, 2, bad], [1, 2, 4]):
        scheduler.add(RequestHandle(rows=[RowRequest(tokens, DIFFUSION["dual"], 3)]))
    found: dict[tuple[int, ...], RowResult] = {}
    while scheduler.waiting or scheduler.running:
        for event in scheduler.update(executor.execute(scheduler.schedule(0.0)), 0.0):
            if isinstance(event, RowFinished):
                found[tuple(event.handle.rows[0].tokens)] = event.result
    assert {tokens: result.non_finite for tokens, result in found.items()} == {
        (1, 2, 3): False, (1, 2, bad): True, (1, 2, 4): False
    }  # fmt: skip
    assert engine.compiled_programs == before


def test_an_autoregressive_row_grows_into_wider_buckets() -> None:
    engine = golden_cases.engine(folder=golden_cases.FOLDER.parent / "qwen3_tiny")
    config = SamplingConfig(max_new_tokens=150, temperature=0.9, log_probabilities=True)
    executor = Executor(engine.runner, [PoolShape(config, 192, 2, widths=(128,), max_programs=2)])
    scheduler = Scheduler([pool.limits for pool in executor.pools], SchedulerPolicy(step_seconds=None))
    request = RowRequest([3, 1, 4], config, 5)
    scheduler.add(RequestHandle(rows=[request]))
    widths, found = [], []
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule(0.0)
        widths += [bucket.width for pool in plan.pools for bucket in pool.buckets]
        events = scheduler.update(executor.execute(plan), 0.0)
        found += [event.result for event in events if isinstance(event, RowFinished)]
    assert sorted(set(widths)) == [128, 192]
    assert scheduler.stats.moves == 1
    assert scheduler.stats.useful_share <= 1
    expected = alone(engine, request)
    np.testing.assert_array_equal(found[0].sequence, expected.sequence)
    np.testing.assert_allclose(found[0].log_probabilities, expected.log_probabilities, atol=1e-4)


_COLLECTIVES = r" = .*? (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_an_int8_cache_moves_bit_by_bit(mesh: str) -> None:
    engine = Engine.load(golden_cases.FOLDER, mesh, kv_cache="int8")
    config, count = generalized(DIFFUSION["prefix"]), 2 * engine.layout.spec.data
    wide, narrow = (open_slots(engine.runner, config, width, count, max(WIDTHS), width) for width in WIDTHS[::-1])
    narrow.copied = max(WIDTHS)
    request = RowRequest([1, 2, 3], DIFFUSION["prefix"], 3)
    wide.insert({1: request})
    narrow.insert({})
    wide.run(2)
    narrow.put_caches(count - 1, wide.take_caches(1))
    for old, new in zip(jax.tree.leaves(wide.state.cache), jax.tree.leaves(narrow.state.cache), strict=True):
        old, new = np.asarray(old), np.asarray(new)
        np.testing.assert_array_equal(new[:, count - 1], old[:, 1, :, : WIDTHS[0]])
        assert not new[:, 0].any(), "no other row is touched"
