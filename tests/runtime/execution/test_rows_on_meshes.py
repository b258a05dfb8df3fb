"""Ragged rows yield the same tokens on a mesh as on one device."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests import golden_cases
from tests.golden_cases import MESHES
from tests.runtime.execution.ragged import MASK, MODES, SEEDS, ragged_rows, real, request, run, start_canvas
from tests.runtime.execution.reference_loop import assert_same_tokens

RANKED = ("maskgit_plus", "topk_margin", "entropy")


SOME_MESHES = ("tensor=8", "data=2,tensor=2", "sequence=4")
# Every mesh runs `origin`. Golden cases run the other algorithms on every mesh, without sampling.
IN_CI = {
    *((mesh, "origin-sampled" if mesh in SOME_MESHES else "origin-greedy") for mesh in MESHES[1:]),
    *itertools.product(["data=2,tensor=2", "sequence=4"], ["entropy-positions"]),
    ("tensor=8", "maskgit_plus-sampled"),
    ("tensor=8", "topk_margin-sampled"),
    ("data=2,tensor=2", "entropy-sampled"),
}
GRID = [
    pytest.param(*pair, marks=[] if pair in IN_CI else pytest.mark.slow)
    for pair in itertools.product(MESHES[1:], MODES)
    if pair in IN_CI or pair[0] in (*SOME_MESHES, "tensor=16", "data=2,sequence=2,tensor=4")
]


def test_every_mesh_runs_origin_in_ci() -> None:
    fast = [case.values for case in GRID if not case.marks]
    assert {mesh for mesh, mode in fast if request(mode).algorithm == "origin"} == set(MESHES[1:])


@pytest.mark.parametrize(("mesh", "mode"), GRID)
def test_seeded_runs_are_the_same_on_every_mesh(mesh: str, mode: str) -> None:
    found, expected = run(mesh, mode), run("data=1", mode)
    assert found.seeds == expected.seeds
    for row in range(4):
        assert_same_tokens(
            real(found.history, row),
            real(expected.history, row),
            start_canvas(row),
            golden_cases.engine(),
            request(mode),
            SEEDS[row],
        )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [*SOME_MESHES, "sequence=2,tensor=4"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.endswith("greedy")])
def test_many_seeds_are_the_same_on_every_mesh(mesh: str, mode: str) -> None:
    for trial in range(20):
        config = request(mode, seed=[4 * trial + row for row in range(4)])
        found = golden_cases.engine(mesh).generate_tokens(*ragged_rows(), config, history=True)
        expected = golden_cases.engine().generate_tokens(*ragged_rows(), config, history=True)
        for row in range(4):
            assert_same_tokens(
                real(found.history, row),
                real(expected.history, row),
                start_canvas(row),
                golden_cases.engine(),
                config,
                4 * trial + row,
            )


@pytest.mark.parametrize("mesh", ["data=1", *SOME_MESHES])
@pytest.mark.parametrize("algorithm", RANKED)
def test_one_hot_ties_go_to_the_lowest_position(mesh: str, algorithm: str) -> None:
    """With one token kept, every position has the same confidence: exactly 1, or an entropy of exactly 0."""
    if mesh in ("data=2,tensor=2", "sequence=4") and algorithm != "entropy":
        pytest.skip("one algorithm is enough for this mesh")
    # This uses the program of the sampled runs; with one token kept, there is nothing to draw.
    result = golden_cases.engine(mesh).generate_tokens(
        *ragged_rows(), request(f"{algorithm}-sampled", top_k=1), history=True
    )
    for row in range(4):
        for before, after in itertools.pairwise([start_canvas(row), *real(result.history, row)]):
            masked = np.flatnonzero(before == MASK)
            committed = np.flatnonzero(before != after)
            np.testing.assert_array_equal(committed, masked[: len(committed)])
