"""The number of rows run at a time follows from the estimated memory."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from runtime.engine import Engine
from runtime.execution import runner
from runtime.models.config import ModelConfig
from runtime.models.families import model_layout, parse_config
from runtime.planner.memory import estimate_memory
from runtime.planner.workload import Workload
from sharding.mesh import MeshSpec
from sharding.topology import CHIPS
from tests.checkpoints.small import MICRO

CONFIG = parse_config(MICRO | {"max_position_embeddings": 512})
CANVAS = 128


def engine_of(mesh: str, config: ModelConfig = CONFIG) -> Engine:
    """An engine that can be queried but not run, because its weights are only shapes."""
    spec = MeshSpec.parse(mesh)
    layout = model_layout(config, spec, jax.devices())
    return Engine(layout, layout.abstract_weights(jnp.float32))


CHIP = replace(CHIPS["h100"], platform="cpu")  # a CPU's programs are estimated as a GPU's


@pytest.mark.parametrize("mesh", ["data=1", "data=2", "data=2,sequence=2,tensor=2"])
@pytest.mark.parametrize("megabytes", [8, 40])
def test_rows_of_a_batch_fit_and_one_more_does_not(mesh: str, megabytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = model_layout(CONFIG, MeshSpec.parse(mesh), jax.devices()).bytes_per_device("float32")
    free = megabytes << 20
    monkeypatch.setattr(runner, "device_memory", lambda device: weights + free)
    engine = engine_of(mesh)
    data = engine.layout.spec.data
    found = engine.batch_size(1 << 20, CANVAS)
    assert found % data == 0

    def needed(rows: int) -> int:
        workload = Workload(CONFIG, "float32", rows, CANVAS // 2, CANVAS // 2, CANVAS // 2)
        return estimate_memory(workload, engine.layout, CHIP).total - weights

    assert needed(found) <= 0.7 * free
    assert needed(found + data) > 0.7 * free


def test_a_cache_leaves_room_for_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "device_memory", lambda device: 64 << 20)
    engine = engine_of("data=1", replace(CONFIG, num_layers=64))
    assert 1 <= engine.batch_size(1 << 20, CANVAS, cached=True) < engine.batch_size(1 << 20, CANVAS)


def test_one_row_of_each_shard_is_always_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "device_memory", lambda device: 1)
    assert engine_of("data=2").batch_size(7, CANVAS) == 2


def test_a_device_that_does_not_say_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "device_memory", lambda device: None)
    assert engine_of("data=2").batch_size(1 << 20, CANVAS) == 2 * runner.MAX_ROWS_PER_SHARD
