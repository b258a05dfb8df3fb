"""The host arrays of a row have the shapes and dtypes that are declared for the programs."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

from runtime import DiffusionConfig, SamplingConfig
from runtime.decoding.decode_state import DecodeRequest
from runtime.execution.programs import abstract_decode, abstract_denoise
from runtime.execution.row_arrays import autoregressive_row, diffusion_row
from runtime.execution.row_request import RowRequest
from runtime.execution.rows import with_model_blocks
from runtime.models.arrays import one_row, only_row_fields, resized_row
from runtime.models.declarations import ModelLayout
from runtime.models.families import parse_config, weights_class
from runtime.models.kv_cache import abstract_cache
from tests import golden_cases

WIDTH, STEPS = 64, 64


def shapes(tree: object) -> list[tuple[str, tuple[int, ...], jnp.dtype]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path), leaf.shape, leaf.dtype) for path, leaf in leaves]


def layout(folder: str) -> ModelLayout:
    config = parse_config(json.loads((golden_cases.FOLDER.parent / folder / "config.json").read_text()))
    return ModelLayout.create(config, weights_class(config))


@pytest.mark.parametrize(("folder", "drafts"), [("dream_tiny", 0), ("dream_tiny", 3), ("dreamon_tiny", 0)])
@pytest.mark.parametrize("kept", [False, True], ids=["plain", "log_probabilities"])
@pytest.mark.parametrize("occupied", [False, True], ids=["free", "occupied"])
def test_diffusion_rows_are_as_declared(occupied: bool, kept: bool, folder: str, drafts: int) -> None:
    own = layout(folder)
    config = DiffusionConfig(max_new_tokens=8, steps=5, temperature=0.3, log_probabilities=kept, draft_steps=drafts)
    config = with_model_blocks(config, own.config)
    request = RowRequest([1, 2, 3], config, seed=(1 << 63) - 1) if occupied else None
    row = diffusion_row(request, config, own.config, WIDTH, STEPS)
    assert shapes(row) == shapes(abstract_denoise(own, 1, WIDTH, STEPS, log_probabilities=kept, drafts=drafts))


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("kept", [False, True], ids=["plain", "log_probabilities"])
@pytest.mark.parametrize("occupied", [False, True], ids=["free", "occupied"])
def test_autoregressive_rows_are_as_declared(occupied: bool, kept: bool, drafts: int) -> None:
    own = layout("qwen3_tiny")
    config = SamplingConfig(max_new_tokens=8, top_k=3, log_probabilities=kept, prompt_lookup=drafts)
    request = RowRequest([1, 2, 3], config, seed=5) if occupied else None
    row = autoregressive_row(request, config, own.config, WIDTH)
    assert shapes(row) == shapes(abstract_decode(own, 1, WIDTH, None, log_probabilities=kept, drafts=drafts > 0))


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_the_limit_of_steps_does_not_depend_on_the_slots(cache: str) -> None:
    """With a parallel rule, it is one step per position of a block; a model that predicts masks may need them all."""
    config = DiffusionConfig(max_new_tokens=8, parallel="threshold", algorithm="entropy", cache=cache)
    request = RowRequest([1, 2, 3], config, seed=5)
    narrow, wide = (diffusion_row(request, config, layout("dream_tiny").config, width, 128)[0] for width in (16, 128))
    for name in ("block_length", "steps_per_block", "block_steps", "ends", "first"):
        assert getattr(narrow, name) == getattr(wide, name)
    assert int(wide.steps_per_block[0]) == 11


def test_optional_arrays_are_described_only_when_asked_for() -> None:
    own = layout("qwen3_tiny")
    assert abstract_cache(own, 1, WIDTH, jnp.float32).key_scales is None
    assert abstract_cache(own, 1, WIDTH, jnp.int8).key_scales.dtype == jnp.float32
    assert abstract_decode(own, 1, WIDTH, None)[1].log_probabilities is None


def test_a_fraction_is_not_cast_to_an_integer() -> None:
    with pytest.raises(TypeError, match="same_kind"):
        one_row(DecodeRequest, prompts=0.5)


def test_a_row_is_resized_with_the_values_of_an_empty_row() -> None:
    own, config = layout("dream_tiny"), DiffusionConfig(max_new_tokens=8, steps=5)
    request = RowRequest([1, 2, 3], config, seed=5)
    for width in (WIDTH // 2, WIDTH * 2):
        moved = resized_row(
            only_row_fields(diffusion_row(request, config, own.config, WIDTH, STEPS)[1]),
            only_row_fields(diffusion_row(None, config, own.config, width, STEPS)[1]),
        )
        expected = only_row_fields(diffusion_row(request, config, own.config, width, STEPS)[1])
        assert jax.tree.all(jax.tree.map(lambda one, other: (one == other).all(), moved, expected))
