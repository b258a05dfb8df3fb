"""The head runs only on masked positions, and arrays over the vocabulary stay small."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runtime import DiffusionConfig
from runtime.decoding import choices
from runtime.decoding.loop_parameters import row_names
from runtime.engine import Engine
from runtime.execution.programs import abstract_denoise, compiler_options, lower_denoise
from runtime.execution.runner import head_chunk
from runtime.execution.specialization import denoise_program
from runtime.models.attention import choose_attention
from runtime.models.families import model_layout, parse_config
from runtime.models.forward import Forward
from runtime.models.random_weights import random_weights
from runtime.models.transformer import project_logits
from sharding.aot import aot_devices
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology
from tests.checkpoints.small import MICRO
from tests.compilation import AS_RELEASED
from tests.runtime.test_layer_copies import needs_cuda

SMALL = parse_config(MICRO | {"max_position_embeddings": 512})
# The vocabulary is so large that arrays over it dominate the program's memory.
WIDE = replace(SMALL, vocab_size=152064)


@pytest.mark.parametrize("mesh", ["data=1", "sequence=2", "data=2,tensor=2"])
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_chunks_of_few_rows(mesh: str, platform: str) -> None:
    """A chunk has at most 128 positions per row on any mesh, and never more than the canvas."""
    layout = model_layout(SMALL, MeshSpec.parse(mesh))
    data = layout.spec.data
    assert head_chunk(data, 512, layout, platform) == 128
    assert head_chunk(4 * data, 8192, layout, platform) == 128
    assert head_chunk(16 * data, 512, layout, platform) == 32 * layout.spec.sequence
    assert head_chunk(data, 64, layout, platform) == 64


def test_chunks_divide_by_a_sequence_axis_that_is_no_power_of_two() -> None:
    layout = model_layout(SMALL, MeshSpec.parse("sequence=3"))
    assert head_chunk(1, 768, layout, "cpu") % 3 == 0
    assert head_chunk(1, 768, layout, "tpu") == 126


@pytest.mark.parametrize("rows", [1, 3])
def test_the_head_follows_the_masks(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step runs only as many chunks as the rows' masks need; rows get the same tokens as in a batch of one."""
    ran = []

    def counted(*arguments: Any) -> jax.Array:
        jax.debug.callback(lambda: ran.append(1))
        return project_logits(*arguments)

    monkeypatch.setattr(choices, "project_logits", counted)
    layout = model_layout(SMALL, MeshSpec(), jax.devices())
    engine = Engine(layout, random_weights(layout, 0, "float32", scale=0.3))
    prompts = np.arange(5, 5 + 100 * rows, dtype=np.int32).reshape(rows, 100) % 50 + 5
    masked = np.array([90, 0, 40])[:rows]
    for prompt, masks in zip(prompts, masked, strict=True):
        prompt[5 : 5 + masks] = SMALL.mask_token_id
    config = DiffusionConfig(
        max_new_tokens=100, steps=16, algorithm="entropy", temperature=0.7, suppress_mask=True, seed=list(range(rows))
    )
    found = engine.generate_tokens(prompts, None, config, history=True)
    jax.effects_barrier()
    before = np.concatenate([masked[None] + 100, (found.history == SMALL.mask_token_id).sum(axis=-1)[:-1]])
    size = rows * head_chunk(rows, 200, layout, "cpu")
    assert len(ran) == sum(math.ceil(masks / size) for masks in before.sum(axis=1))
    assert len(ran) < 0.7 * len(before) * math.ceil(200 * rows / size)
    for row, prompt in enumerate(prompts):
        alone = engine.generate_tokens(prompt[None], None, config.replace(seed=[row]))
        np.testing.assert_array_equal(found.sequences[row], alone.sequences[0])


@pytest.mark.parametrize(("mesh", "size"), [("tensor=1", 8), ("tensor=2", 33)])
def test_windows_on_one_cpu_run_the_head_in_small_chunks(mesh: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a window, a single CPU computes the logits of the masks that are left; the tokens are those of a mesh."""
    ran: list[int] = []

    def counted(forward: Any, weights: Any, hidden: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: ran.append(hidden.shape[1]))
        return project_logits(forward, weights, hidden)

    def generate(mesh: str) -> Any:
        layout = model_layout(SMALL, MeshSpec.parse(mesh), jax.devices()[: MeshSpec.parse(mesh).size])
        engine = Engine(layout, random_weights(layout, 0, "float32", scale=0.3))
        config = DiffusionConfig(
            max_new_tokens=32, steps=32, algorithm="entropy", cache="dual", block_length=32, suppress_mask=True
        )
        return engine.generate_tokens(np.arange(5, 25)[None], None, config, history=True)

    exact = generate("data=1,sequence=2")
    monkeypatch.setattr(choices, "project_logits", counted)
    found = generate(mesh)
    jax.effects_barrier()
    np.testing.assert_array_equal(found.history, exact.history)
    assert set(ran[1:]) == {size}
    masks = (found.history == SMALL.mask_token_id).sum(axis=(1, 2))[:-1]
    assert len(ran) == sum(math.ceil(left / size) for left in masks[1:]) + math.ceil(masks[0] / ran[0])


def test_a_chunk_has_the_run_time_parameters_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    choose = choices.choose

    def reading(forward: Any, program: Any, request: Any, *others: Any) -> choices.Choices:
        arrays = {name: getattr(request, name) for name in row_names(DiffusionConfig)}
        shapes.update({name: values.shape for name, values in arrays.items() if values is not None})
        return choose(forward, program, request, *others)

    monkeypatch.setattr(choices, "choose", reading)
    layout = model_layout(SMALL, MeshSpec(), jax.devices()[:1])
    program = denoise_program(DiffusionConfig(), SMALL, "float32", chunk=32, width=512, span=512)
    lower_denoise(
        Forward(layout, choose_attention("auto", "cpu", layout, 512, jnp.float32)),
        program,
        layout.abstract_weights(jnp.float32),
        *abstract_denoise(layout, 3, 512, 512),
    )
    assert {"threshold", "cfg_scale", "temperature"} < shapes.keys()
    assert set(shapes.values()) == {(3, 32)}


@pytest.mark.programs
@pytest.mark.parametrize(
    ("platform", "passes"),
    [
        ("cpu", {"float32": 16, "model": 8}),
        ("v4:2x2x1", {"float32": 16}),
        ("v5e:2x2", {"float32": 11, "model": 6}),
        pytest.param("4xh200", {"float32": 11, "model": 6}, marks=[needs_cuda, pytest.mark.slow]),
    ],
    ids=["cpu", "v4", "v5e", "h200"],
)
def test_arrays_over_the_vocabulary(platform: str, passes: dict[str, int]) -> None:
    """The program holds few arrays of at most 128 positions per row, and writes none during the threshold search."""
    devices = jax.devices() if platform == "cpu" else aot_devices(parse_topology(platform))
    spec, rows, canvas = MeshSpec(data=1 if platform == "cpu" else 4), 4, 512
    rows = spec.data
    layout = model_layout(WIDE, spec, devices[: spec.size])
    kind = devices[0].platform
    for confidence_dtype, expected in passes.items():
        program = denoise_program(
            DiffusionConfig.published(256, confidence_dtype=confidence_dtype),
            WIDE,
            "bfloat16",
            chunk=head_chunk(rows, canvas, layout, kind),
            width=canvas,
            span=canvas,
        )
        assert program.sampling.filtered
        assert program.sampling.sampled
        compiled = lower_denoise(
            Forward(layout, choose_attention("auto", kind, layout, canvas, jnp.bfloat16)),
            program,
            layout.abstract_weights(jnp.bfloat16),
            *abstract_denoise(layout, rows, canvas, canvas),
        ).compile(
            compiler_options=(compiler_options(layout, jnp.bfloat16) or {}) | (AS_RELEASED if kind == "cpu" else {})
        )
        text, array = compiled.as_text(), 128 * layout.padded_vocab * 4
        # There is room for two such arrays and the rest of the small model, but not for three.
        assert compiled.memory_analysis().temp_size_in_bytes < 2.5 * array
        shapes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"\b(?:f32|s32|u32)\[([\d,]+)\]", text)}
        assert 0 < max(math.prod(shape) for shape in shapes if layout.padded_vocab in shape) * 4 <= array
        if kind == "gpu":
            check_passes_without_a_loop(text, layout.padded_vocab, expected)
            continue
        body = search_loop(text, expected)
        over_vocabulary = [line for line in body if re.search(rf"= [^(]*\b{layout.padded_vocab}\]", line)]
        # The body's only such arrays are its arguments, keys and masses, which it reads and passes on.
        assert all(re.search(r" (get-tuple-element|bitcast)\(", line) for line in over_vocabulary), over_vocabulary
        assert sum("get-tuple-element" in line for line in over_vocabulary) == 2


def check_passes_without_a_loop(text: str, vocab: int, passes: int) -> None:
    """Each pass of the threshold search is one fusion that reads the vocabulary, and none writes an array over it."""
    reading = 0
    for line in text.splitlines():
        found = re.search(r" = (.*) fusion\(.*calls=%([\w.\-]+).*/threshold_search/", line)
        if found is not None:
            assert f",{vocab}]" not in found[1], line
            parameters = text[text.index(f"\n%{found[2]} (") :].split(") -> ")[0]
            reading += f",{vocab}]" in parameters
    assert reading == passes


def computation(text: str, name: str) -> list[str]:
    """The instructions of a computation of an HLO module."""
    return text[text.index(f"\n%{name} (") :].split("\n}")[0].splitlines()[2:]


def search_loop(text: str, passes: int) -> list[str]:
    """The body of the only threshold search, whose configuration or condition states this number of passes."""
    found = []
    for loop in re.findall(r" while\(.*", text):
        names = re.search(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)", loop)
        assert names is not None
        bound = [line for line in computation(text, names[1]) if f"constant({passes})" in line]
        if "threshold_search" in loop and (f'"n":"{passes}"' in loop or bound):
            found.append(names[2])
    assert len(found) == 1, found
    return computation(text, found[0])
