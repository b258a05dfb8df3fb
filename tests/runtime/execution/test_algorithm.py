"""Every step follows the algorithm: the schedule equals torch's, and the choices equal those of the reference loop."""

from __future__ import annotations

import itertools
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from runtime import DiffusionConfig, Engine
from runtime.decoding.schedule import transfer_ratios
from runtime.models.dream import DREAM
from tests import golden_cases
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
from tests.runtime.execution.reference_loop import assert_same_tokens, check_against_the_algorithm

# ---- the schedule -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch without vector instructions rounds once more in linspace",
)
@pytest.mark.parametrize("eps", [1e-3, 1e-5, 1e-2, 0.1, 0.3333333, 0.5, 0.9, 0.999])
def test_ratios_are_those_of_torch(eps: float) -> None:
    """Ratios are bit-identical to torch's, and so is every count ``int(masks * ratio)``."""
    generator = np.random.default_rng(int(eps * 1e6))
    for steps in [*range(1, 600), 979, 983, 1009, 1024, 4096, 65536, *generator.integers(300, 5000, 40).tolist()]:
        times = torch.linspace(1, eps, steps + 1)
        expected = (1 - times[1:] / times[:-1]).numpy()
        expected[-1] = 1.0
        found = transfer_ratios(steps, eps)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32), err_msg=f"{steps} steps, {eps}")
    assert any(
        not np.array_equal(1 - other[1:] / other[:-1], transfer_ratios(steps, eps)[: len(other) - 1])
        for steps in range(2, 40)
        for other in [np.linspace(1, eps, steps + 1, dtype=np.float32)]
    ), "numpy's own linspace would have done"


@pytest.mark.parametrize(("tokens", "steps"), [(16, 11), (16, 16), (5, 16), (1, 16), (16, 1), (3, 2)])
def test_steps_that_transfer_nothing(tokens: int, steps: int) -> None:
    """Steps that commit nothing run no forward pass, but are in the history."""
    engine = golden_cases.engine()
    config = request("entropy-greedy", max_new_tokens=tokens, steps=steps, seed=1, suppress_mask=True)
    result = engine.generate_tokens(alone(2), None, config, history=True)
    times = torch.linspace(1, 1e-3, steps + 1)
    left, counts = tokens, []
    for step in range(steps):
        count = left if step == steps - 1 else int(torch.tensor(float(left)) * (1 - times[step + 1] / times[step]))
        counts.append(count)
        left -= count
    assert result.history.shape == (steps, 1, LENGTHS[2] + tokens)
    canvases = [start_canvas(2, tokens), *result.history[:, 0]]
    assert [int((before != after).sum()) for before, after in itertools.pairwise(canvases)] == counts
    assert result.stats.forwards == sum(count > 0 for count in counts)
    assert result.stats.steps == steps
    assert (0 in counts) == (steps >= 16)
    np.testing.assert_array_equal(result.history[-1], result.sequences)
    committed = np.concatenate([np.full(count, step) for step, count in enumerate(counts)])
    np.testing.assert_array_equal(np.sort(result.commit_steps[0, LENGTHS[2] :]), committed)


# ---- a model that predicts MASK ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fond_of_masks(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The golden model with the mask token's row of the head replaced by a frequent token's row times 1.1."""
    folder = tmp_path_factory.mktemp("models") / "fond_of_masks"
    folder.mkdir()
    shutil.copy(golden_cases.FOLDER / "config.json", folder)
    weights = load_file(golden_cases.FOLDER / "model.safetensors")
    head = weights["lm_head.weight"].copy()
    generated = run("data=1", "entropy-greedy").sequences[:, max(LENGTHS) :]
    head[MASK] = 1.1 * head[np.bincount(generated.ravel()).argmax()]
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors")
    return Engine.load(folder, mesh="data=1", dtype="float32")


def test_predicted_masks_stay_masked_and_are_counted(fond_of_masks: Engine) -> None:
    config = request("entropy-greedy")
    result = fond_of_masks.generate_tokens(*ragged_rows(), config, history=True)
    left = sum(int((real(result.sequences, row) == MASK).sum()) for row in range(4))
    assert 0 < left < 4 * NEW_TOKENS
    assert result.stats.masks_left == left
    for row in range(4):
        still = real(result.sequences, row) == MASK
        assert (real(result.commit_steps, row)[still] == -1).all(), "masked positions have no commit step"
    assert result.stats.tokens == (result.commit_steps >= 0).sum()
    for row in range(4):
        check_against_the_algorithm(fond_of_masks, real(result.history, row), start_canvas(row), config, SEEDS[row])
    np.testing.assert_array_equal(result.history[-1], result.sequences)


def test_suppressed_masks_are_never_chosen(fond_of_masks: Engine) -> None:
    config = request("entropy-greedy", suppress_mask=True)
    result = fond_of_masks.generate_tokens(*ragged_rows(), config, history=True)
    assert result.stats.masks_left == 0
    assert not any((real(result.sequences, row) == MASK).any() for row in range(4))
    # Apart from this row of the head, the two models are equal.
    golden = golden_cases.engine().generate_tokens(*ragged_rows(), config, history=True)
    for row in range(4):
        assert_same_tokens(
            real(result.history, row),
            real(golden.history, row),
            start_canvas(row),
            golden_cases.engine(),
            config,
            SEEDS[row],
        )


# ---- against the reference loop ---------------------------------------------------------------------------------


def random_request(number: int) -> DiffusionConfig:
    """A greedy request with randomly chosen settings."""
    generator = np.random.default_rng([number, 7])
    return DiffusionConfig(
        algorithm=DREAM.algorithms[number % 4],
        max_new_tokens=int(generator.integers(1, NEW_TOKENS + 1)),
        steps=int(generator.integers(1, 17)),
        top_p=None if number % 8 < 2 else float(generator.choice([0.05, 0.3, 0.7, 0.95, 0.999])),
        top_k=None if generator.random() < 0.4 else int(generator.choice([1, 2, 5, 50, 319, 320])),
        eps=float(generator.choice([1e-3, 0.01, 0.2])),
        seed=[int(seed) for seed in generator.integers(0, 1 << 63, 4)],
    )


@pytest.mark.parametrize("number", [*range(12), *(pytest.param(one, marks=pytest.mark.slow) for one in range(12, 80))])
def test_greedy_runs_follow_the_algorithm(number: int) -> None:
    engine, config = golden_cases.engine(), random_request(number)
    result = engine.generate_tokens(*ragged_rows(), config, history=True)
    ties = 0
    for row in range(4):
        start = start_canvas(row, config.max_new_tokens)
        ties += check_against_the_algorithm(engine, real(result.history, row), start, config, config.seed[row])
    assert ties <= 1, "rounding rarely decides a choice"


@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.endswith("greedy")])
def test_sampled_runs_follow_the_algorithm(mode: str) -> None:
    """Sampled runs follow the algorithm, with the random bits of each row, step and position."""
    config, result = request(mode), run("data=1", mode)
    ties = 0
    for row in range(4):
        ties += check_against_the_algorithm(
            golden_cases.engine(), real(result.history, row), start_canvas(row), config, SEEDS[row]
        )
    assert ties <= 1, "rounding rarely decides a choice"


@pytest.mark.parametrize("mode", ["origin-greedy", "origin-sampled"])
def test_origin_with_more_steps_than_tokens_follows_the_algorithm(mode: str) -> None:
    """Positions are drawn in every step, even in the many steps that commit nothing."""
    engine, config = golden_cases.engine(), request(mode, steps=3 * NEW_TOKENS)
    result = engine.generate_tokens(*ragged_rows(), config, history=True)
    for row in range(4):
        history = real(result.history, row)
        before = np.concatenate([start_canvas(row)[None], history[:-1]])
        still = int((before == history).all(axis=1).sum())
        assert still > NEW_TOKENS
        check_against_the_algorithm(engine, history, start_canvas(row), config, SEEDS[row])
