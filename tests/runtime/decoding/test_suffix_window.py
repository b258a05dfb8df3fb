"""Blocks that see a part of the canvas: against a NumPy model that keeps every position, on meshes, and in batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from runtime import DiffusionConfig, GenerationResult, can_run
from sharding.errors import InputError
from tests import golden_cases
from tests.runtime.decoding import rules_by_hand
from tests.runtime.decoding.block_rows import same
from tests.runtime.decoding.numpy_dream import NumpyDream

# A canvas of 128 positions, so that refreshes are compiled for 64 and 128.
PROMPT, NEW, BLOCK = 21, 66, 6
BASE = DiffusionConfig(
    NEW, block_length=BLOCK, cache="dual", parallel="threshold", threshold=0.3, algorithm="maskgit_plus"
)
MESHES = ("tensor=4", "sequence=2", "data=2", "data=2,sequence=2,tensor=2")


def prompts(*lengths: int) -> tuple[np.ndarray, np.ndarray]:
    """Random rows, padded on the left, and their attention mask."""
    generator = np.random.default_rng(5)
    mask = (np.arange(max(lengths)) >= max(lengths) - np.array(lengths)[:, None]).astype(np.int32)
    return generator.integers(0, 256, mask.shape).astype(np.int32) * mask, mask


def generate(config: DiffusionConfig, *lengths: int, mesh: str = "tensor=1") -> GenerationResult:
    return golden_cases.engine(mesh).generate_tokens(*prompts(*lengths), config)


def by_hand(prompt: np.ndarray, config: DiffusionConfig, suffix: Sequence[int] = ()) -> tuple[np.ndarray, int, int]:
    """Decode a row. Return its tokens, its forward passes, and the positions of its refreshes."""
    ends, mask = len(prompt) + NEW, golden_cases.engine("tensor=1").config.mask_token_id
    length = ends + len(suffix)
    model = NumpyDream(golden_cases.FOLDER, length)
    canvas = np.array([*prompt, *[mask] * NEW, *suffix])
    forwards = refreshed = 0
    assert config.suffix_window is not None
    assert config.block_length is not None
    for start in range(len(prompt), ends, config.block_length):
        end = min(start + config.block_length, ends)
        visible = np.array(sorted({*range(min(end + config.suffix_window, length)), length - 1}))
        first_step = True
        while (masked := canvas[start:end] == mask).any():
            computed = visible if first_step else visible[visible >= start - 1]
            if config.cache == "dual" and not first_step:
                computed = np.arange(start - 1, end)
            logits = model.run(canvas[computed], computed, visible)
            own = logits[np.searchsorted(computed, np.arange(start - 1, end - 1))][masked]
            shares = np.exp(own - own.max(axis=-1, keepdims=True))
            shares /= shares.sum(axis=-1, keepdims=True)
            accepted = rules_by_hand.accepted(config, shares, masked.mean(), first_step)
            canvas[start + np.flatnonzero(masked)[accepted]] = shares[accepted].argmax(axis=-1)
            refreshed += len(visible) * first_step
            forwards, first_step = forwards + 1, False
    return canvas[:ends], forwards, refreshed


@pytest.mark.parametrize(
    ("cache", "window"),
    [
        ("dual", 9),
        ("prefix", 9),
        pytest.param("dual", 0, marks=pytest.mark.slow),
        pytest.param("prefix", 0, marks=pytest.mark.slow),
        pytest.param("prefix", 40, marks=pytest.mark.slow),
    ],
)
def test_positions_are_kept(cache: str, window: int) -> None:
    config = BASE.replace(cache=cache, suffix_window=window)
    prompt = prompts(PROMPT)[0][0]
    tokens, forwards, refreshed = by_hand(prompt, config)
    found, whole = generate(config, PROMPT), generate(BASE.replace(cache=cache), PROMPT)
    np.testing.assert_array_equal(found.sequences[0], tokens)
    assert found.stats.forwards == forwards
    assert (found.sequences != whole.sequences).any(), "what is hidden matters"
    blocks = NEW // BLOCK
    assert refreshed < blocks * (PROMPT + NEW)
    if cache == "dual":
        assert found.stats.positions == refreshed + (forwards - blocks) * (BLOCK + 1)


def test_a_shortened_block_sees_no_more_of_a_suffix() -> None:
    """The last block has two positions: with a window of 0 it sees the last token of the suffix alone."""
    config, suffix = BASE.replace(block_length=32, suffix_window=0), list(range(7, 47))
    ids, mask = prompts(PROMPT)
    tokens, forwards, refreshed = by_hand(ids[0], config, suffix)
    found = golden_cases.engine("tensor=1").generate_tokens(ids, mask, config, suffixes=[suffix])
    np.testing.assert_array_equal(found.sequences[0], tokens)
    assert found.stats.forwards == forwards
    # Three refreshes; every other pass computes a window of a block and the position before it.
    assert found.stats.positions == refreshed + (forwards - 3) * 33


@pytest.mark.parametrize("cache", ["dual", pytest.param("prefix", marks=pytest.mark.slow)])
def test_a_window_to_the_end_hides_nothing(cache: str) -> None:
    config = BASE.replace(cache=cache)
    found, whole = generate(config.replace(suffix_window=NEW), PROMPT), generate(config, PROMPT)
    same(found, whole)
    assert found.stats.forwards == whole.stats.forwards
    if cache == "dual":
        assert found.stats.positions == whole.stats.positions


MODES: list[dict[str, Any]] = [
    {"cache": "dual", "suffix_window": 8},
    {"cache": "prefix", "suffix_window": 5, "parallel": "none", "threshold": 0.9, "steps": 33, "temperature": 0.7},
    {"cache": "dual", "suffix_window": 0, "refresh_interval": 2, "threshold_decay": 0.5},
]


@pytest.mark.parametrize("number", [0, *[pytest.param(one, marks=pytest.mark.slow) for one in (1, 2)]])
def test_a_row_is_itself_alone(number: int) -> None:
    config, lengths = BASE.replace(**MODES[number]), (33, 5, 20)
    together, (ids, _) = generate(config, *lengths), prompts(*lengths)
    for row, length in enumerate(lengths):
        alone = golden_cases.engine("tensor=1").generate_tokens(
            ids[row : row + 1, max(lengths) - length :], None, config.replace(seed=[together.seeds[row]])
        )
        np.testing.assert_array_equal(alone.sequences[0], together.sequences[row, max(lengths) - length :])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("number", range(len(MODES)))
def test_every_mesh(number: int, mesh: str) -> None:
    config = BASE.replace(**MODES[number])
    expected, found = (generate(config, 33, 5, 20, mesh=where) for where in ("tensor=1", mesh))
    same(found, expected)
    assert found.stats.positions == expected.stats.positions


def test_samples_of_a_prompt_share_refreshes() -> None:
    """The first refresh of two samples is computed once: they have the same canvas and see the same part of it."""
    engine, (ids, _) = golden_cases.engine("tensor=1"), prompts(PROMPT)
    config = BASE.replace(suffix_window=8, temperature=0.9)
    found = engine.generate_tokens(ids, None, config, num_return_sequences=2)
    positions = 0
    for row in range(2):
        alone = engine.generate_tokens(ids, None, config.replace(seed=[found.seeds[row]]))
        np.testing.assert_array_equal(alone.sequences[0], found.sequences[row])
        positions += alone.stats.positions
    assert (found.sequences[0] != found.sequences[1]).any()
    assert found.stats.positions == positions - (PROMPT + BLOCK + 8 + 1)


def test_what_a_window_requires() -> None:
    for changes, said in (
        ({"cache": "none"}, "suffix_window requires cache=dual or cache=prefix"),
        ({"block_rule": "fast_dllm"}, "suffix_window requires block_rule=default"),
        ({"refresh_blocks": 2}, "suffix_window requires refresh_blocks=1"),
        ({"suffix_window": -1}, "suffix_window is -1; expected an integer from 0"),
    ):
        with pytest.raises(InputError) as found:
            BASE.replace(**{"suffix_window": 8} | changes)
        assert said in str(found.value)
        assert found.value.field == "suffix_window"
    assert can_run(BASE.replace(suffix_window=8), BASE)
    assert can_run(BASE.replace(suffix_window=8), BASE.replace(suffix_window=0))
    assert not can_run(BASE, BASE.replace(suffix_window=8))
