"""A planned generation is the one that the engine runs: published settings that the model accepts, and their passes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime import DiffusionConfig
from runtime.execution.draft_models import DraftModel
from runtime.execution.rows import check_kind, default_steps
from runtime.execution.runner import Runner
from runtime.execution.slot_kinds import longest_span
from runtime.execution.specialization import denoise_program
from runtime.models.config import PublishedSettings
from runtime.models.families import model_layout
from runtime.models.kv_cache import cache_bytes_per_device
from runtime.planner.candidates import candidate_meshes
from runtime.planner.estimate import estimate_workload
from runtime.planner.presets import PRESETS, preset
from runtime.planner.workload import Workload
from sharding.errors import InputError
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology
from tests import golden_cases

CACHES = {"bidirectional": ("none", "dual", "prefix"), "block_causal": ("none", "exact"), "causal": ("none",)}


@pytest.mark.parametrize("name", PRESETS)
def test_the_model_accepts_the_planned_decoding(name: str) -> None:
    config = preset(name)
    caches = ("none",) if config.family.variable_length else CACHES[config.family.attention]
    for cache in caches:
        workload = Workload(config, cache=cache)
        if config.objective == "autoregressive":
            check_kind(config, workload.sampling())
            continue
        planned = workload.decoding()
        check_kind(config, planned)
        # Only parallel rules are left out, because what they save depends on the text.
        changed = {"cache": cache, "parallel": "none", "threshold": 0.9}
        if cache != "none" or config.family.attention == "block_causal":
            changed["block_length"] = planned.block_length
        for parameter, value in (config.family.published_settings("") | changed).items():
            assert getattr(planned, parameter) == value, parameter


def test_the_plan_of_llada_is_its_own_decoding() -> None:
    workload = Workload(preset("llada-8b"), new_tokens=64, steps=32)
    assert workload.decoding() == DiffusionConfig(64, steps=32, algorithm="low_confidence", block_length=32)
    assert workload.masks_of_blocks(512) == [tuple(range(32, 0, -2))] * 2


def test_decoding_that_the_model_refuses_cannot_be_planned() -> None:
    config = preset("llada-8b")
    wrong = replace(config.family, published=(PublishedSettings("", {"algorithm": "entropy"}),))
    with pytest.raises(InputError, match="algorithm=entropy is not available for llada models"):
        Workload(replace(config, family=wrong))


@pytest.mark.parametrize("name", ["dream_tiny", "llada_tiny", "sdar_tiny"])
def test_the_engine_runs_the_planned_passes(name: str) -> None:
    engine = golden_cases.engine("data=1", golden_cases.FOLDER.parent / name)
    for new, steps in ((48, 48), (44, 20), (24, 60)):
        workload = Workload(engine.config, "float32", 1, 8, new, steps)
        (phase,) = workload.phases(engine.layout, engine.platform)
        result = engine.generate_tokens(
            np.full((1, 8), 5, np.int32), config=workload.decoding().replace(suppress_mask=True)
        )
        assert result.stats.masks_left == 0
        assert phase.forwards == result.stats.forwards


@pytest.mark.parametrize(
    ("name", "cache", "new", "block"),
    [("dream_tiny", "dual", 12, 32), ("sdar_tiny", "exact", 3, 4)],
)
def test_the_default_block_may_be_longer_than_the_new_tokens(name: str, cache: str, new: int, block: int) -> None:
    """The decoder does not shorten its windows to the new tokens, so the plan does not either."""
    engine = golden_cases.engine("data=1", golden_cases.FOLDER.parent / name)
    steps = default_steps(engine.config, new, block)
    workload = Workload(engine.config, "float32", 1, 8, new, steps, cache, block)
    decoding = workload.decoding().replace(suppress_mask=True)
    result = engine.generate_tokens(np.full((1, 8), 5, np.int32), config=decoding)
    assert result.stats.masks_left == 0
    phases = workload.phases(engine.layout, engine.platform)
    assert sum(phase.forwards for phase in phases) == result.stats.forwards
    canvas, span = (of(engine.layout, engine.platform) for of in (workload.canvas, workload.span))
    program = denoise_program(decoding, engine.config, "float32", chunk=8, width=canvas, span=span)
    assert workload.windows(engine.layout, engine.platform) == program.windows


def test_a_plan_requires_a_number_of_drafts() -> None:
    with pytest.raises(InputError, match="draft_steps is 'auto'; expected an integer from 0 to 63") as error:
        Workload(preset("diffucoder-7b"), draft_steps="auto")  # type: ignore[arg-type]
    assert error.value.field == "draft_steps"


def test_a_plan_counts_the_draft_model() -> None:
    """Its weights and its cache; and the mesh divides both models."""
    plain = Workload(preset("qwen3-8b"))
    drafted, topology = replace(plain, draft=DraftModel(preset("qwen3-0.6b"))), parse_topology("v5e:2x2")
    own, both = (estimate_workload(one, topology, MeshSpec(tensor=4)).memory for one in (plain, drafted))
    layout = model_layout(preset("qwen3-0.6b"), MeshSpec(tensor=4))
    canvas = plain.canvas(layout, "tpu")
    needed = layout.bytes_per_device("bfloat16") + cache_bytes_per_device(layout, 1, canvas, "bfloat16")
    assert both.total - own.total == needed
    stored = replace(plain, draft=DraftModel(preset("qwen3-0.6b"), "int8"))
    small = estimate_workload(stored, topology, MeshSpec(tensor=4)).memory.total - own.total
    quantized = model_layout(preset("qwen3-0.6b"), MeshSpec(tensor=4), quantization="int8")
    weights = [one.bytes_per_device("bfloat16") for one in (layout, quantized)]
    assert needed - small == weights[0] - weights[1], "its weights alone are int8"
    # A table of positions has the draft model's own length.
    learned = estimate_workload(replace(plain, draft=DraftModel(preset("gpt2"))), topology, MeshSpec(tensor=4)).memory
    held = {one.name: one.bytes for one in learned.resident}
    expected = model_layout(preset("gpt2"), MeshSpec(tensor=4)).bytes_per_device("bfloat16")
    assert held["weights (draft model)"] == expected
    narrow = replace(preset("qwen3-0.6b"), intermediate_size=3074)
    meshes = candidate_meshes(replace(plain, draft=DraftModel(narrow)), topology)
    assert {one.tensor for one in candidate_meshes(plain, topology)} == {1, 2, 4}
    assert {one.tensor for one in meshes} == {1, 2}


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_the_prefill_is_as_wide_as_the_engines(platform: str) -> None:
    for prompt, sequence in itertools.product((50, 256, 4200), (1, 3, 4, 6)):
        workload = Workload(preset("qwen2.5-7b"), prompt=prompt)
        layout = workload.layout(MeshSpec(sequence=sequence))
        runner: Any = object.__new__(Runner)
        runner.layout, runner.platform = layout, platform
        rows: list[Any] = [SimpleNamespace(config=workload.sampling(), tokens=range(prompt))]
        prefill = workload.phases(layout, platform)[0]
        expected = min(workload.canvas(layout, platform), longest_span(runner, rows))
        assert prefill.positions == prefill.keys == expected
        assert expected % sequence == 0
