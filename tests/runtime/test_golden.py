"""Tokens and logits equal those of the original code, for every golden folder, on one device and on meshes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import DiffusionConfig, Engine
from runtime.models.dream import DREAM as DREAM_FAMILY
from runtime.models.llada import LLADA as LLADA_FAMILY
from sharding.aot import missing_compiler
from tests import golden_cases
from tests.golden_cases import DREAM, FOLDER, MESHES, Golden
from tests.runtime.models import test_llada

# On these meshes, programs are those of users; on the others, they scan layers, and are compiled with little
# optimization, as in all tests. An empty XLA_FLAGS compiles all programs with XLA's defaults. On one device, CI runs
# the cases of Dream and the first case of each other folder as for users; the other cases have a second test each,
# marked slow.
AS_RELEASED = ("data=1", "sequence=2,tensor=4")


def pairwise(golden: Golden) -> set[tuple[str, str]]:
    """Return the meshes and names of a folder's cases that run in CI. The whole grid is marked slow.

    Every case runs on one device. Every mesh runs one case of each algorithm of Dream, another one than the mesh before
    it, and one case of each other folder.
    """
    cases = names(golden)
    chosen = {(MESHES[0], name) for name in cases}
    by_algorithm = defaultdict(list)
    for name in cases if golden.folder == FOLDER else ():
        by_algorithm[golden.cases[name]["alg"]].append(name)
    for number, mesh in enumerate(MESHES[1:], 1):
        some = [own[number % len(own)] for own in by_algorithm.values()] or [cases[5 * number % len(cases)]]
        chosen |= {(mesh, name) for name in some}
    return chosen


def engine(golden: Golden, mesh: str, as_released: bool) -> Engine:
    """The engine of a golden folder on a mesh, whose programs are those of users, or are compiled in less time."""
    if as_released:
        return golden_cases.engine_as_released(mesh, golden.folder)
    return golden_cases.engine(mesh, golden.folder, scan=True)


def is_as_released(golden: Golden, mesh: str) -> bool:
    """Whether the only test of a case on a mesh, or the one in CI, compiles its programs as for users."""
    return mesh in AS_RELEASED and (golden.folder == FOLDER or mesh != MESHES[0])


def names(golden: Golden) -> list[str]:
    """Return the names of a folder's cases; for an unreadable folder, one name whose test fails with the reason."""
    try:
        return list(golden.cases)
    except (OSError, ValueError, KeyError, TypeError):
        return ["cases.json"]


def grid() -> Iterator[Any]:
    for golden in golden_cases.golden_folders():
        quick = pairwise(golden)
        for mesh, name in itertools.product(MESHES, names(golden)):
            marks = [] if (mesh, name) in quick else pytest.mark.slow
            released, label = is_as_released(golden, mesh), f"{golden.folder.name}-{mesh}-{name}"
            yield pytest.param(golden, mesh, name, released, marks=marks, id=label)
            if mesh in AS_RELEASED and not released:
                more = [] if name == names(golden)[0] else pytest.mark.slow
                yield pytest.param(golden, mesh, name, True, marks=more, id=f"{label}-as-released")


def forward_grid() -> Iterator[Any]:
    for golden, mesh in itertools.product(golden_cases.golden_folders(), MESHES):
        marks = [] if mesh == MESHES[0] or golden.folder == FOLDER else pytest.mark.slow
        yield pytest.param(golden, mesh, marks=marks, id=f"{golden.folder.name}-{mesh}")


def check_case(golden: Golden, mesh: str, name: str, as_released: bool = False) -> None:
    """Assert that a case yields the original's tokens on a mesh; see :func:`check_tokens`."""
    check_tokens(golden, name, golden.config(name), engine(golden, mesh, as_released))


def check_tokens(golden: Golden, name: str, config: Any, model: Engine) -> None:
    """Assert that a case yields the original's tokens and, if recorded, its canvas after every step."""
    history = golden.arrays.get(f"{name}.history")
    result = model.generate_tokens(*golden.inputs(name), config, history=golden.in_blocks or history is not None)
    if golden.in_blocks:
        check_rows(golden, name, result.sequences)
        check_canvases(golden, name, result.history, config, model.config.mask_token_id)
        passes = golden.passes(name)
        assert passes is None or result.stats.forwards == passes
        return
    expected = golden.sequences(name, result.sequences.shape[1], model.config.pad_token_id)
    np.testing.assert_array_equal(result.sequences, expected)
    if "forwards" in golden.cases[name]:
        assert result.stats.forwards == golden.cases[name]["forwards"]
    if history is None:
        return
    if golden.family == "DreamOn":
        # One row, whose history is as wide as its longest canvas; the bucket is wider.
        assert result.history is not None
        wider = result.history.shape[2] - history.shape[1]
        history = np.pad(history, ((0, 0), (0, wider)), constant_values=-1)[:, None]
    np.testing.assert_array_equal(result.history, history)


def check_canvases(
    golden: Golden, name: str, history: np.ndarray | None, config: DiffusionConfig, mask_token: int
) -> None:
    """Assert that the canvases of one row include, in order, those that the original ran its passes on."""
    passes, facts = (golden.arrays.get(f"{name}.forward_{kind}") for kind in ("ids", "meta"))
    (prompt, *others), _ = golden.inputs(name)
    if passes is None or others:
        return
    assert history is not None
    start = np.append(prompt, np.full(config.max_new_tokens, mask_token))
    canvases = np.concatenate([start[None], history[:, 0]])
    step, final = 0, int((canvases == canvases[-1]).all(axis=1).argmax())
    for number, (ids, (first, length, is_stored, *_)) in enumerate(zip(passes[:, 0], facts, strict=True)):
        if is_stored:
            continue
        end = min(first + length, canvases.shape[1])
        same = (canvases[step:, first:end] == ids[: end - first]).all(axis=1)
        if not same.any() and config.stop_token_ids and step >= final - 1:
            return  # the original completes the block after a stop token
        assert same.any(), f"pass {number}, positions {first} to {end}, after step {step} of {final}"
        step += int(same.argmax())


def check_rows(golden: Golden, name: str, sequences: np.ndarray) -> None:
    """Assert that the rows of a case in blocks begin with the original's tokens, up to a stop token."""
    mask = golden.inputs(name)[1]
    expected = golden.rows(name)
    assert len(expected) == len(sequences)
    for row, tokens in enumerate(expected):
        start = 0 if mask is None else int(mask[row].argmax())
        np.testing.assert_array_equal(sequences[row, start : start + len(tokens)], tokens)


@pytest.mark.parametrize(("golden", "mesh", "name", "as_released"), list(grid()))
def test_sequences_and_history(golden: Golden, mesh: str, name: str, as_released: bool) -> None:
    check_case(golden, mesh, name, as_released)


def test_every_mesh_meets_every_algorithm_in_ci() -> None:
    """``origin`` and ``random`` draw the positions, so no golden case has them.

    ``test_rows_on_meshes.py`` runs ``origin`` on every mesh, and ``test_llada.py`` runs ``random``.
    """
    fast = [case.values for case in grid() if not case.marks]
    for family, folder in ((DREAM_FAMILY, FOLDER), (LLADA_FAMILY, test_llada.GOLDEN.folder)):
        met = {(mesh, golden.config(name).algorithm) for golden, mesh, name, _ in fast if golden.folder == folder}
        assert met == set(itertools.product(MESHES, set(family.algorithms) - {"origin", "random"}))
    # The parametrization is the only mark: a slow test would have another.
    [mark] = test_llada.test_random_positions_are_the_same_on_every_mesh.pytestmark  # type: ignore[attr-defined]
    assert mark.args == ("mesh", MESHES[1:])


def drafted_grid() -> Iterator[Any]:
    """The cases of full-canvas models, to be run with drafts. The first of each algorithm runs in CI."""
    for golden in golden_cases.golden_folders({}):
        if golden.family not in ("Dream", "llada"):
            continue
        met = set()
        for name in names(golden):
            algorithm = golden.config(name).algorithm
            marks = pytest.mark.slow if algorithm in met else []
            met.add(algorithm)
            yield pytest.param(golden, name, marks=marks, id=f"{golden.folder.name}-{name}")


@pytest.mark.parametrize(("golden", "name"), list(drafted_grid()))
def test_drafts_keep_the_original_tokens(golden: Golden, name: str) -> None:
    model, history = engine(golden, MESHES[0], False), golden.arrays.get(f"{name}.history")
    config = golden.config(name).replace(draft_steps=3)
    result = model.generate_tokens(*golden.inputs(name), config, history=history is not None)
    expected = golden.sequences(name, result.sequences.shape[1], model.config.pad_token_id)
    np.testing.assert_array_equal(result.sequences, expected)
    if history is not None:
        np.testing.assert_array_equal(result.history, history)
    assert result.stats.forwards <= golden.cases[name].get("forwards", np.inf)


@pytest.mark.slow
@pytest.mark.skipif(
    missing_compiler("gpu") is not None or not Path("/dev/nvidia0").exists(),
    reason="needs an NVIDIA GPU and JAX's CUDA plugin",
)
def test_tokens_on_a_gpu() -> None:
    """Runs in a separate process, because this one simulates devices on CPU."""
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    subprocess.run([sys.executable, "-m", "tests.runtime.gpu_golden"], env=environment, check=True, timeout=3600)


@pytest.mark.parametrize(("golden", "mesh"), list(forward_grid()))
def test_logits(golden: Golden, mesh: str) -> None:
    # A folder without logits has the weights of one that has them.
    others = [other for other in golden_cases.golden_folders({}) if other.forwards]
    assert golden.forwards or any(map(golden.has_weights_of, others))
    for forward in golden.forwards:
        ids, mask = golden.inputs(forward)
        # A name may state the block length of the attention mask: forward_block8.
        _, _, length = forward.partition("_block")
        blocks = {"block_length": int(length)} if length else {}
        found = engine(golden, mesh, mesh in AS_RELEASED).logits(ids, mask, **blocks)
        expected = golden.arrays[f"{forward}.logits"]
        # The original codes differ in the logits at padding.
        real = np.ones(ids.shape, bool) if mask is None else mask == 1
        assert np.abs(found - expected)[real].max() < 1e-4
        assert np.abs(expected)[real].max() > 1.0  # the bound means something


def test_folders_are_named_by_the_environment(tmp_path: Path) -> None:
    """A named folder is never skipped: if it cannot be run, its test fails with the reason."""
    own = golden_cases.golden_folders({})
    assert DREAM in own
    assert golden_cases.golden_folders({"DIFFUMESH_GOLDEN": f"{FOLDER}:{tmp_path}/"}) == [*own, DREAM, Golden(tmp_path)]

    assert names(Golden(tmp_path)) == ["cases.json"]
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        check_case(Golden(tmp_path), "data=1", "cases.json")

    (tmp_path / "cases.json").write_text(json.dumps({"about": {}, "cases": [{"name": "one", "steps": 2}]}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "other"}))
    assert names(Golden(tmp_path)) == ["one"]
    with pytest.raises(ValueError, match="model_type 'other' are not known"):
        check_case(Golden(tmp_path), "data=1", "one")

    # Wrong expected tokens fail, for every family.
    wrong = Golden(FOLDER)
    wrong.arrays["entropy_onestep.sequences"][0, -1] += 1
    with pytest.raises(AssertionError, match="Mismatched elements: 1"):
        check_case(wrong, "data=1", "entropy_onestep", as_released=True)
