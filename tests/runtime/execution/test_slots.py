"""Rows with different parameters in the same slots yield the same tokens as in a batch of one, as rows come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runtime import DiffusionConfig, Engine, SamplingConfig
from runtime.decoding.block_schedule import block_schedule
from runtime.execution.autoregressive_slots import AutoregressiveSlots
from runtime.execution.row_request import RowRequest, RowResult
from runtime.execution.slot_kinds import DiffusionSlots
from runtime.execution.slots import Slots
from runtime.execution.specialization import generalized
from tests import golden_cases
from tests.runtime.execution.test_offline import alone, autoregressive, prompts, qwen2

__all__ = ["qwen2"]

WIDTH = 64
OWN: list[dict[str, Any]] = [
    {"temperature": 0.0, "top_p": None},
    {"temperature": 0.9, "top_k": 5, "max_new_tokens": 5},
    {"temperature": 0.0, "top_p": 0.6, "max_new_tokens": 9},
    {"temperature": 1.5, "top_p": None},
    {"stop_token_ids": tuple(range(40))},
]
SCHEDULES: list[dict[str, Any]] = [
    {"steps": 3, "alg_temp": 0.5},
    {"steps": 40, "block_length": 4},
    {"steps": 12, "eps": 0.1},
    {"steps": 1},
    {"steps": 12, "block_length": 5, "alg_temp": 1.0},
]


def asked(engine: Engine, base: DiffusionConfig | SamplingConfig, own: list[dict[str, Any]]) -> list[RowRequest]:
    masked = None if engine.config.objective == "autoregressive" else engine.config.mask_token_id
    rows = prompts(engine.config.vocab_size, masked)
    return [
        RowRequest(row, base.replace(**changes), seed=number * 104729)
        for number, (row, changes) in enumerate(zip(rows, own, strict=False))
    ]


def finish(slots: Slots, taken: dict[int, tuple[int, RowRequest]], every: int = 2) -> list[RowResult]:
    found = []
    while taken:
        done = slots.run(every)
        canvas = slots.canvas()
        over = {slot: taken.pop(slot) for slot in list(taken) if done[slot]}
        results = slots.collect(over)
        for (slot, (_, request)), result in zip(over.items(), results, strict=True):
            # Tokens that were reported as final are unchanged in the result.
            own = canvas[slot, : request.length]
            np.testing.assert_array_equal(own[own >= 0], result.sequence[own >= 0])
        found += results
    return found


def check(engine: Engine, slots: Slots, requests: list[RowRequest]) -> None:
    expected = [alone(engine, replace(one, config=one.config.replace(log_probabilities=True))) for one in requests]
    # As if the slots had run for long: the iteration counter is near the limit of int32.
    slots.iterations = (1 << 31) - 2
    # Two rows are inserted, then one is evicted for another, then the rest is inserted.
    slots.insert({0: requests[0], 2: requests[1]})
    slots.run(2)
    slots.insert({2: None})
    assert slots.run(1)[2]
    # The first insertion was from the host, later ones are on the mesh; prompts beside running rows are read in chunks.
    slots.compile()
    compiled = engine.compiled_programs
    slots.insert({1: requests[2], 2: requests[1]})
    found = finish(slots, {0: (0, requests[0]), 1: (2, requests[2]), 2: (1, requests[1])})
    slots.insert({0: requests[4], 1: requests[3]})
    found += finish(slots, {0: (4, requests[4]), 1: (3, requests[3])})
    assert engine.compiled_programs == compiled
    assert sorted(result.number for result in found) == list(range(5))
    for result in found:
        other = expected[result.number]
        np.testing.assert_array_equal(result.sequence, other.sequence)
        np.testing.assert_array_equal(result.commit_steps, other.commit_steps)
        np.testing.assert_allclose(result.log_probabilities, other.log_probabilities, atol=1e-4)


@pytest.mark.parametrize(
    "fixed",
    [
        {"algorithm": "entropy"},
        pytest.param(
            {"algorithm": "maskgit_plus", "cache": "dual", "block_length": 4, "parallel": "threshold"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"algorithm": "origin"}, marks=pytest.mark.slow),
        pytest.param({"algorithm": "topk_margin", "cache": "prefix", "block_length": 4}, marks=pytest.mark.slow),
        pytest.param({"algorithm": "maskgit_plus", "parallel": "factor"}, marks=pytest.mark.slow),
    ],
    ids=lambda fixed: "-".join(map(str, fixed.values())),
)
@pytest.mark.parametrize("mesh", ["tensor=1", pytest.param("data=2,sequence=2,tensor=2", marks=pytest.mark.slow)])
def test_diffusion_rows_with_parameters_of_their_own(mesh: str, fixed: dict[str, Any]) -> None:
    engine = golden_cases.engine(mesh)
    base = DiffusionConfig(max_new_tokens=12, steps=12, temperature=0.7, top_p=0.95, **fixed)
    own: list[dict[str, Any]] = [dict(changes) for changes in OWN]
    for changes, schedule in zip(own, SCHEDULES, strict=True):
        if base.parallel != "none":
            own_rule = {"threshold": 0.1 * schedule["steps"] % 1, "factor": 0.2 * schedule["steps"]}
            changes[base.parallel] = own_rule[base.parallel]
        else:
            changes |= {name: value for name, value in schedule.items() if name != "block_length"}
        if base.cache == "none":
            changes |= {name: value for name, value in schedule.items() if name == "block_length"}
        else:
            changes["refresh_interval"] = schedule["steps"]
    requests = asked(engine, base, own)
    steps = max(block_schedule(one.config, WIDTH)[1] for one in requests if isinstance(one.config, DiffusionConfig))
    # The configuration of the slots may have more steps than the inserted rows.
    wide = generalized(base.replace(steps=100))
    assert isinstance(wide, DiffusionConfig)
    count = 3 if mesh == "tensor=1" else 4
    check(engine, DiffusionSlots(engine.runner, wide, WIDTH, count, steps), requests)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor=1", "data=2,sequence=2,tensor=2"])
def test_autoregressive_rows_with_parameters_of_their_own(qwen2: str, mesh: str) -> None:
    engine = autoregressive(qwen2, mesh)
    base = SamplingConfig(max_new_tokens=12, temperature=0.7, top_p=0.95)
    wide = generalized(base)
    assert isinstance(wide, SamplingConfig)
    count = 3 if mesh == "tensor=1" else 4
    check(engine, AutoregressiveSlots(engine.runner, wide, WIDTH, count, WIDTH), asked(engine, base, OWN))


def run_alone(create: Callable[[], Slots], request: RowRequest) -> tuple[RowResult, int]:
    """Return the result of a row that has slots of its own, and its number of iterations."""
    slots = create()
    slots.insert({0: request})
    assert slots.run()[0]
    return slots.collect({0: (0, request)})[0], slots.iterations


def check_endings(create: Callable[[], Slots], requests: list[RowRequest]) -> None:
    """Rows that share slots: a run ends in the iteration in which a row does, and changes no token of the others.

    The first two of the rows get a stop token that is among their tokens.
    """
    for number, place in ((0, 3), (1, 7)):
        request = requests[number]
        token = int(run_alone(create, request)[0].sequence[len(request.tokens) + place])
        requests[number] = replace(request, config=request.config.replace(stop_token_ids=(token,)))
    own, lengths = zip(*(run_alone(create, request) for request in requests), strict=True)
    # Some of the rows end at a stop token, before the others.
    assert len(set(lengths)) > 1
    slots = create()
    slots.insert(dict(enumerate(requests)))
    for length in sorted(set(lengths)):
        done = slots.run(min_running=sum(other >= length for other in lengths))
        assert slots.iterations == length
        assert done[:3].tolist() == [other <= length for other in lengths]
    for number, found in enumerate(slots.collect(dict(enumerate(enumerate(requests))))):
        np.testing.assert_array_equal(found.sequence, own[number].sequence)
        np.testing.assert_array_equal(found.commit_steps, own[number].commit_steps)


@pytest.mark.parametrize(
    "fixed",
    [
        {},
        pytest.param({"cache": "dual", "block_length": 4, "refresh_blocks": 0}, marks=pytest.mark.slow),
        pytest.param({"cache": "prefix", "block_length": 4}, marks=pytest.mark.slow),
        pytest.param({"parallel": "threshold", "threshold": 0.2, "algorithm": "maskgit_plus"}, marks=pytest.mark.slow),
        pytest.param({"cache": "dual", "block_length": 4, "draft_steps": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda fixed: "-".join(map(str, fixed.values())),
)
@pytest.mark.parametrize("mesh", ["tensor=1", pytest.param("data=2,sequence=2,tensor=2", marks=pytest.mark.slow)])
def test_a_run_ends_with_the_first_row_of_a_diffusion_model(mesh: str, fixed: dict[str, Any]) -> None:
    engine = golden_cases.engine(mesh)
    base = DiffusionConfig(max_new_tokens=12, steps=12, **fixed)
    requests = asked(engine, base, [{}, {}, {}])
    count = 3 if mesh == "tensor=1" else 4
    check_endings(lambda: DiffusionSlots(engine.runner, base, WIDTH, count, 12), requests)


@pytest.mark.parametrize("mesh", ["tensor=1", pytest.param("data=2,sequence=2,tensor=2", marks=pytest.mark.slow)])
def test_a_run_ends_with_the_first_row_of_an_autoregressive_model(qwen2: str, mesh: str) -> None:
    engine = autoregressive(qwen2, mesh)
    base = SamplingConfig(max_new_tokens=12)
    requests = asked(engine, base, [{}, {}, {}])
    count = 3 if mesh == "tensor=1" else 4
    check_endings(lambda: AutoregressiveSlots(engine.runner, base, WIDTH, count, WIDTH), requests)
