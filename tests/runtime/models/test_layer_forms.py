"""Both forms of layers, a scanned stack and a tuple, have the same weights, logits and tokens."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import load_weights, open_folder
from runtime.decoding.parameters import DiffusionConfig
from runtime.engine import Engine
from runtime.models.declarations import ModelLayout, scans_layers
from runtime.models.families import model_layout, parse_config
from runtime.models.kv_cache import abstract_cache, cache_bytes_per_device
from runtime.models.random_weights import random_weights
from sharding.aot import aot_devices
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology
from tests import golden_cases
from tests.golden_cases import DREAM, FOLDER, Golden

QWEN3 = Golden(FOLDER.parent / "qwen3_tiny")


def layout_of(mesh: str, golden: Golden = DREAM, *, scan: bool | None, quantization: str = "none") -> ModelLayout:
    spec = MeshSpec.parse(mesh)
    config = parse_config(open_folder(golden.folder).config)
    return model_layout(config, spec, jax.devices()[: spec.size], quantization, scan)


@functools.cache
def scanning(mesh: str, golden: Golden = DREAM) -> Engine:
    """An engine that scans its layers, on a platform where the default is a tuple."""
    folder, layout = open_folder(golden.folder), layout_of(mesh, golden, scan=True)
    return Engine(layout, load_weights(folder, layout, jnp.float32)[0], folder=folder)


def by_source(layout: ModelLayout, weights: Any) -> dict[str, Any]:
    """The array of every source tensor; for a quantized weight, its int8 values and its scales."""
    named, found = layout.named(weights), {}
    for leaf in layout.leaves:
        for place, source in enumerate(leaf.sources):
            own = jax.tree.map(lambda array, place=place: array[place], named[leaf.name]) if leaf.is_stacked else None
            found[source] = jax.tree.map(np.asarray, named[leaf.name] if own is None else own)
    return found


def test_the_form_follows_the_platform_of_the_devices() -> None:
    assert not layout_of("data=1", scan=None).scan_layers
    assert layout_of("data=1", scan=True).scan_layers
    assert not scans_layers("gpu")
    assert not scans_layers("cuda")
    config = parse_config(open_folder(FOLDER).config)
    tpu = model_layout(config, MeshSpec(), aot_devices(parse_topology("v5e:2x2")))
    assert tpu.scan_layers
    layers = tpu.abstract_weights(jnp.bfloat16).layers
    assert layers.q_proj.shape[0] == config.num_layers
    here = layout_of("data=1", scan=None).abstract_weights(jnp.bfloat16).layers
    assert [layer.q_proj.shape for layer in here] == [layers.q_proj.shape[1:]] * config.num_layers


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_weights_are_the_same_in_both_forms(quantization: str) -> None:
    """Weights from a checkpoint, random weights, and placed weights."""
    folder = open_folder(FOLDER)
    layouts = [layout_of("tensor=4", scan=scan, quantization=quantization) for scan in (True, False)]
    assert len(layouts[0].leaves) < len(layouts[1].leaves)
    assert layouts[0].bytes_per_device("float32") == layouts[1].bytes_per_device("float32")
    assert layouts[0].parameter_count == layouts[1].parameter_count
    assert layouts[0].layer_cost == layouts[1].layer_cost
    made = {
        "loaded": [load_weights(folder, layout, jnp.float32)[0] for layout in layouts],
        "random": [random_weights(layout, 3, "float32") for layout in layouts],
    }
    for stacked, separate in made.values():
        found, expected = by_source(layouts[0], stacked), by_source(layouts[1], separate)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    first = by_source(layouts[1], made["random"][1])
    q_proj = [jax.tree.leaves(value)[0] for source, value in first.items() if source.endswith("q_proj.weight")]
    assert (q_proj[0] != q_proj[1]).any(), "layers differ"


@pytest.mark.parametrize("mesh", ["data=1", "tensor=8", "data=2,sequence=2,tensor=2"])
def test_logits_are_the_same_in_both_forms(mesh: str) -> None:
    ids, mask = DREAM.inputs("forward")
    expected = golden_cases.engine(mesh).logits(ids, mask)
    found = scanning(mesh).logits(ids, mask)
    real = np.ones(ids.shape, bool) if mask is None else mask == 1
    assert np.abs(found - expected)[real].max() <= 1e-5 * np.abs(expected)[real].max()


@pytest.mark.parametrize(
    ("golden", "mesh", "name"),
    [
        (DREAM, "data=1", next(iter(DREAM.cases))),
        (DREAM, "sequence=2,tensor=4", next(iter(DREAM.cases))),
        (QWEN3, "data=1", next(iter(QWEN3.cases))),
        (QWEN3, "data=2,tensor=2", next(iter(QWEN3.cases))),
    ],
    ids=lambda value: value.folder.name if isinstance(value, Golden) else value,
)
def test_scanned_layers_give_golden_tokens(golden: Golden, mesh: str, name: str) -> None:
    engine = scanning(mesh, golden)
    result = engine.generate_tokens(*golden.inputs(name), golden.config(name))
    expected = golden.sequences(name, result.sequences.shape[1], engine.config.pad_token_id)
    np.testing.assert_array_equal(result.sequences, expected)


@pytest.mark.parametrize("drafts", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mesh", ["data=1", "sequence=2,tensor=2"])
def test_tokens_with_a_cache_are_the_same_in_both_forms(mesh: str, drafts: int) -> None:
    ids = np.random.default_rng(0).integers(0, 300, (2, 6))
    config = DiffusionConfig(max_new_tokens=16, steps=16, cache="dual", block_length=8, draft_steps=drafts)
    found = [engine.generate_tokens(ids, None, config) for engine in (scanning(mesh), golden_cases.engine(mesh))]
    np.testing.assert_array_equal(found[0].sequences, found[1].sequences)
    np.testing.assert_array_equal(found[0].commit_steps, found[1].commit_steps)


def test_the_cache_has_the_form_of_the_layers() -> None:
    layouts = [layout_of("tensor=2", scan=scan) for scan in (True, False)]
    stacked, separate = (abstract_cache(layout, 2, 32, "int8") for layout in layouts)
    layers = layouts[0].config.num_layers
    assert isinstance(separate, tuple)
    assert len(separate) == layers > 1
    assert stacked.keys.shape == (layers, *separate[0].keys.shape[1:])
    assert {layer.keys.shape[0] for layer in separate} == {1}
    assert separate[0].key_scales.sharding.spec == stacked.key_scales.sharding.spec
    sizes = [cache_bytes_per_device(layout, 2, 32, "int8") for layout in layouts]
    assert sizes[0] == sizes[1]
