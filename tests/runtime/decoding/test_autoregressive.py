"""Qwen2 and GPT-2: same tokens as transformers, on every mesh, with and without a cache, in ragged batches."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers

from runtime import DiffusionConfig, Engine, SamplingConfig
from runtime.execution.autoregressive_slots import shared_prompt_group
from runtime.models.leaves import WeightLeaf
from sharding.errors import InputError
from tests import golden_cases

MODELS = ("qwen2", "qwen2_tied", "gpt2", "gpt2_vocab_517")
MESHES = ("tensor=2", "tensor=4", "tensor=8", "data=2", "sequence=2", "data=2,sequence=2,tensor=2")
# The default run covers every mesh and every model; the slow tests cover every combination.
QUICK_GRID = {
    ("tensor=1", "qwen2"),
    ("tensor=1", "gpt2"),
    ("tensor=2", "qwen2_tied"),
    ("tensor=4", "gpt2_vocab_517"),
    ("tensor=8", "qwen2"),
    ("tensor=8", "gpt2"),
    ("tensor=8", "gpt2_vocab_517"),
    ("data=2", "qwen2"),
    ("sequence=2", "gpt2"),
    ("data=2,sequence=2,tensor=2", "qwen2_tied"),
}
GRID = [
    pytest.param(*pair, marks=() if pair in QUICK_GRID else pytest.mark.slow)
    for pair in itertools.product(["tensor=1", *MESHES], MODELS)
]
ROWS, WIDTH, NEW = 4, 13, 20
LENGTHS = (13, 5, 1, 9)


def torch_model(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    common = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.2}
    if name.startswith("gpt2"):
        vocab = 517 if name.endswith("517") else 50257
        config = transformers.GPT2Config(vocab_size=vocab, n_embd=96, n_layer=3, n_head=12, n_positions=64, **common)
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.Qwen2Config(
        vocab_size=515,
        hidden_size=112,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=name.endswith("tied"),
        rope_theta=1e4,
        **common,
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    with torch.no_grad():  # a bias that is zero would not be missed
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name in MODELS:
        made[name] = tmp_path_factory.mktemp(name)
        torch_model(name).save_pretrained(made[name])
    return made


@functools.cache
def engine(folder: Path, mesh: str, kv_cache: str = "model") -> Engine:
    return Engine.load(folder, mesh, kv_cache=kv_cache)


def ragged(vocab: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(1).integers(1, vocab, (ROWS, WIDTH)).astype(np.int32)
    mask = (np.arange(WIDTH) >= WIDTH - np.array(LENGTHS)[:, None]).astype(np.int32)
    return ids * mask, mask


@functools.cache
def greedy_of_transformers(name: str) -> np.ndarray:
    model = torch_model(name)
    ids, mask = ragged(model.config.vocab_size)
    with torch.no_grad():
        made = model.generate(
            torch.tensor(ids).long(), attention_mask=torch.tensor(mask).long(), max_new_tokens=NEW, do_sample=False
        )
    return made.numpy()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    ids = np.random.default_rng(2).integers(1, 500, (2, 11))
    with torch.no_grad():
        expected = torch_model(name)(torch.tensor(ids)).logits.numpy()
    for mesh in ("tensor=1", "tensor=8"):
        found = engine(folders[name], mesh).logits(ids)
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(("mesh", "name"), GRID)
def test_greedy_tokens_are_those_of_transformers(folders: dict[str, Path], mesh: str, name: str) -> None:
    ids, mask = ragged(engine(folders[name], mesh).config.vocab_size)
    found = engine(folders[name], mesh).generate_tokens(ids, mask, SamplingConfig(max_new_tokens=NEW))
    np.testing.assert_array_equal(found.sequences, greedy_of_transformers(name))
    assert found.stats.forwards == NEW


@pytest.mark.parametrize("name", ["qwen2", pytest.param("gpt2_vocab_517", marks=pytest.mark.slow)])
def test_cached_is_uncached(folders: dict[str, Path], name: str) -> None:
    ids, mask = ragged(500)
    for mesh in ("tensor=1", "data=2,sequence=2,tensor=2"):
        for temperature in (0.0, 1.0):
            config = SamplingConfig(max_new_tokens=NEW, temperature=temperature, log_probabilities=True, seed=3)
            cached = engine(folders[name], mesh).generate_tokens(ids, mask, config)
            plain = engine(folders[name], mesh).generate_tokens(ids, mask, config.replace(use_cache=False))
            np.testing.assert_array_equal(cached.sequences, plain.sequences)
            np.testing.assert_array_equal(cached.commit_steps, plain.commit_steps)
            assert cached.log_probabilities is not None
            np.testing.assert_allclose(cached.log_probabilities, plain.log_probabilities, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2", pytest.param("gpt2_vocab_517", marks=pytest.mark.slow)])
def test_sampled_runs_do_not_depend_on_mesh_or_batch(folders: dict[str, Path], name: str) -> None:
    ids, mask = ragged(500)
    config = SamplingConfig(max_new_tokens=NEW, temperature=0.9, top_p=0.9, top_k=40, seed=7)
    expected = engine(folders[name], "tensor=1").generate_tokens(ids, mask, config, num_return_sequences=2)
    assert (expected.sequences[0] != expected.sequences[1]).any()
    for mesh in ("tensor=8", "data=2,sequence=2,tensor=2"):
        found = engine(folders[name], mesh).generate_tokens(ids, mask, config, num_return_sequences=2)
        np.testing.assert_array_equal(found.sequences, expected.sequences)
    alone = engine(folders[name], "tensor=1").generate_tokens(
        ids[1:2, -LENGTHS[1] :], None, config.replace(seed=[expected.seeds[3]])
    )
    np.testing.assert_array_equal(alone.sequences[0], expected.sequences[3, -LENGTHS[1] - NEW :])


@pytest.mark.parametrize("mesh", [pytest.param("tensor=1", marks=pytest.mark.slow), "data=2,sequence=2,tensor=2"])
def test_a_prompt_is_read_once_for_all_its_samples(folders: dict[str, Path], mesh: str) -> None:
    own = engine(folders["qwen2"], mesh)
    ids, mask = ragged(500)
    config = SamplingConfig(max_new_tokens=NEW, temperature=0.9, log_probabilities=True)
    seeds = list(range(ROWS * 3))
    together = own.generate_tokens(ids, mask, config.replace(seed=seeds), num_return_sequences=3)
    # Prompts alternate, so no two adjacent rows share a prompt.
    order = [3 * row + sample for sample in range(3) for row in range(ROWS)]
    in_turn = config.replace(seed=[seeds[number] for number in order])
    apart = own.generate_tokens(np.tile(ids, (3, 1)), np.tile(mask, (3, 1)), in_turn)
    np.testing.assert_array_equal(together.sequences[order], apart.sequences)
    np.testing.assert_allclose(together.log_probabilities[order], apart.log_probabilities, atol=1e-5)
    every_row_its_own = 3 * int(mask.sum()) + 3 * ROWS * (NEW - 1)
    assert together.stats.positions < every_row_its_own
    # Each data shard has six of the twelve rows. Groups of three samples fit into a shard; groups of five would not.
    odd = own.generate_tokens(ids[:2], mask[:2], config.replace(seed=seeds[:10]), num_return_sequences=5)
    np.testing.assert_array_equal(odd.sequences[0], together.sequences[0])


def test_samples_in_partly_filled_shards_keep_their_prompts(folders: dict[str, Path]) -> None:
    """Fourteen rows in sixteen slots: a shard with a free slot has rows of two prompts side by side."""
    generator = np.random.default_rng(1)
    ids = generator.integers(0, 500, (7, 6))
    config = SamplingConfig(max_new_tokens=NEW)
    found = engine(folders["qwen2"], "data=4").generate_tokens(ids, None, config, num_return_sequences=2)
    for row, prompt in enumerate(ids):
        alone = engine(folders["qwen2"], "data=1").generate_tokens(prompt[None], None, config)
        for sample in (2 * row, 2 * row + 1):
            np.testing.assert_array_equal(found.sequences[sample], alone.sequences[0])


@pytest.mark.parametrize(
    ("slots", "size"),
    [
        ({0: "a", 1: "a", 2: "b", 3: "b"}, 2),
        ({0: "a", 1: "a", 2: "a", 4: "b", 5: "b", 6: "b"}, 4),
        ({0: "a", 1: "a", 4: "b", 5: "c"}, 1),
        ({0: "a", 3: "b"}, 1),
        ({0: "a"}, 4),
        ({}, 4),
    ],
)
def test_slots_that_share_a_prompt(slots: dict[int, str], size: int) -> None:
    prompts = {slot: tuple(map(ord, text)) for slot, text in slots.items()}
    assert shared_prompt_group(prompts, 4) == size


def test_a_row_waits_for_a_slot_without_another_result_in_an_int8_cache(folders: dict[str, Path]) -> None:
    """A row reads its prompt in the same way whether it is among the first rows or comes later."""
    ids, mask = ragged(515)
    config = SamplingConfig(max_new_tokens=NEW, log_probabilities=True)
    split = Engine.load(folders["qwen2"], "tensor=1", dtype="float32", kv_cache="int8", max_batch=1)
    found = split.generate_tokens(ids, mask, config)
    for row in range(len(ids)):
        alone = split.generate_tokens(ids[row : row + 1], mask[row : row + 1], config)
        np.testing.assert_array_equal(found.sequences[row], alone.sequences[0])
        np.testing.assert_allclose(found.log_probabilities[row], alone.log_probabilities[0], atol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "temperature", "filters"),
    [
        ("tensor=1", 1.3, {"top_k": 12}),
        ("data=2,sequence=2,tensor=2", 0.9, {"top_p": 0.7}),
        ("tensor=1", 0.9, {"top_k": 40, "top_p": 0.7}),
    ],
)
def test_samples_follow_the_distribution(
    folders: dict[str, Path], mesh: str, temperature: float, filters: dict[str, Any]
) -> None:
    """The first tokens of many seeds follow the model's filtered probabilities (chi-squared test)."""
    own = engine(folders["qwen2"], mesh)
    ids, _ = ragged(500)
    logits = own.logits(ids[:1])[0, -1].astype(np.float64) / temperature
    order = np.argsort(-logits)
    shares = np.exp(logits[order] - logits.max())
    shares /= shares.sum()
    # The token at which the mass crosses top_p is kept. Of both filters, transformers applies top_k first.
    count_kept = filters.get("top_k", len(order))
    if "top_p" in filters:
        masses = np.cumsum(shares[:count_kept]) / shares[:count_kept].sum()
        count_kept = int(np.searchsorted(masses, filters["top_p"])) + 1
    assert 5 < count_kept < 50
    expected = shares[:count_kept] / shares[:count_kept].sum()
    count = 2000
    config = SamplingConfig(max_new_tokens=1, temperature=temperature, seed=1, **filters)
    drawn = own.generate_tokens(ids[:1], None, config, num_return_sequences=count).sequences[:, -1]
    found = np.array([(drawn == token).sum() for token in order[:count_kept]])
    assert found.sum() == count, "a token was drawn that the filter leaves out"
    statistic = ((found - count * expected) ** 2 / (count * expected)).sum()
    freedom = count_kept - 1
    assert statistic < freedom + 5.0 * (2 * freedom) ** 0.5  # five deviations of it


def test_log_probabilities_are_those_of_the_logits(folders: dict[str, Path]) -> None:
    own = engine(folders["gpt2"], "tensor=1")
    ids, mask = ragged(500)
    config = SamplingConfig(max_new_tokens=6, temperature=0.8, top_k=30, log_probabilities=True)
    found = own.generate_tokens(ids, mask, config)
    full = np.pad(mask, ((0, 0), (0, 6)), constant_values=1)
    logits = torch.tensor(own.logits(found.sequences, full)).log_softmax(dim=-1).numpy()
    expected = np.take_along_axis(logits[:, :-1], found.sequences[:, 1:, None], axis=2)[..., 0]
    assert found.log_probabilities is not None
    np.testing.assert_allclose(found.log_probabilities[:, WIDTH:], expected[:, WIDTH - 1 :], atol=1e-4)
    assert not found.log_probabilities[:, :WIDTH].any()


def test_rows_end_with_their_own_stop_token(folders: dict[str, Path]) -> None:
    own = engine(folders["qwen2"], "data=2,sequence=2,tensor=2")
    ids, mask = ragged(515)
    whole = greedy_of_transformers("qwen2")[:, WIDTH:]
    stop = int(whole[0, 3])
    found = own.generate_tokens(ids, mask, SamplingConfig(max_new_tokens=NEW, stop_token_ids=(stop,)))
    new = found.sequences[:, WIDTH:]
    for row in range(ROWS):
        ends = np.flatnonzero(whole[row] == stop)
        end = ends[0] + 1 if ends.size else NEW
        np.testing.assert_array_equal(new[row, :end], whole[row, :end])
        assert (new[row, end:] == own.config.pad_token_id).all()
        assert (found.commit_steps[row, WIDTH:] == np.where(np.arange(NEW) < end, np.arange(NEW), -1)).all()
    assert found.stats.tokens == (found.commit_steps >= 0).sum()


def test_streamed_is_whole_and_programs_are_few(folders: dict[str, Path]) -> None:
    own = Engine.load(folders["qwen2"], "tensor=1")
    ids, mask = ragged(515)
    config = SamplingConfig(max_new_tokens=NEW, temperature=0.7)
    first = own.generate_tokens(ids, mask, config)
    assert first.stats.compiled_programs == 2  # one reads prompts, one writes tokens
    pieces = list(own.stream_tokens(ids, mask, config, every=3))
    np.testing.assert_array_equal(pieces[-1][1], first.sequences)
    assert [done for done, _ in pieces] == [0, 3, 6, 9, 12, 15, 18, 20]
    for new in (1, 5, 20, 40):
        for width in (1, 4, 13):
            made = own.generate_tokens(ids[:, -width:], None, config.replace(max_new_tokens=new, seed=new))
            assert made.stats.compiled_programs == 0
    # Samples of a prompt share a prefill, which is a different program; decoding uses the same program.
    pairs = own.generate_tokens(ids[:2], mask[:2], config, num_return_sequences=2)
    assert len(pairs.sequences) == len(first.sequences)
    assert pairs.stats.compiled_programs == 1


@pytest.mark.parametrize("kv_cache", ["bfloat16", "int8"])
def test_a_smaller_cache_is_near(folders: dict[str, Path], kv_cache: str) -> None:
    """A cache of lower precision changes log-probabilities slightly, except for tokens that do not read the cache."""
    ids, mask = ragged(515)
    config = SamplingConfig(max_new_tokens=NEW, log_probabilities=True)
    exact = engine(folders["qwen2"], "tensor=1").generate_tokens(ids, mask, config)
    for mesh in ("tensor=1", "data=2,sequence=2,tensor=2"):
        found = engine(folders["qwen2"], mesh, kv_cache).generate_tokens(ids, mask, config)
        np.testing.assert_array_equal(found.sequences[:, WIDTH], exact.sequences[:, WIDTH])
        together = np.cumprod(found.sequences[:, WIDTH:] == exact.sequences[:, WIDTH:], axis=1).astype(bool)
        assert found.log_probabilities is not None
        assert exact.log_probabilities is not None
        gaps = np.abs(found.log_probabilities - exact.log_probabilities)[:, WIDTH:][together]
        assert 0 < gaps.max() < 0.3
        assert together.mean() > 0.3


def test_the_wrong_kind_of_request_says_so(folders: dict[str, Path]) -> None:
    own = engine(folders["gpt2"], "tensor=1")
    ids, mask = ragged(500)
    with pytest.raises(InputError, match="autoregressive: pass a SamplingConfig"):
        own.generate_tokens(ids, mask, DiffusionConfig(max_new_tokens=4))
    with pytest.raises(InputError, match="autoregressive"):
        own.generate_tokens(ids, mask, SamplingConfig(), history=True)
    with pytest.raises(InputError, match="the model allows 64"):
        own.generate_tokens(ids, mask, SamplingConfig(max_new_tokens=60))
    with pytest.raises(InputError, match="diffusion model: pass a DiffusionConfig"):
        golden_cases.engine("tensor=1").generate_tokens([[1, 2]], None, SamplingConfig())


@pytest.mark.parametrize("changes", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"stop_token_ids": ["x"]}])
def test_requests_that_cannot_be_meant(changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(changes))):
        SamplingConfig(**changes)  # type: ignore[arg-type]


# ---- quantized weights, and other weights in the same programs ----------------------------------------------------


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("name", ["gpt2_vocab_517", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_quantized_weights_are_near_and_the_same_on_every_mesh(
    folders: dict[str, Path], name: str, quantize: str
) -> None:
    ids, _ = ragged(500)
    original = engine(folders[name], "tensor=1")
    small = Engine.load(folders[name], "tensor=1", quantize=quantize)
    found = small.logits(ids)

    def widened(leaf: WeightLeaf) -> jax.Array:
        kept, exact = small.layout.named(small.weights)[leaf.name], original.layout.named(original.weights)[leaf.name]
        if not leaf.quantized:
            return kept
        assert leaf.contracted
        places = tuple(place for place, axis in enumerate(leaf.axes) if axis in leaf.contracted)
        if leaf.group is None:
            scales = np.expand_dims(np.asarray(kept.scales), places)
            largest = np.abs(np.asarray(exact)).max(axis=places, keepdims=True)
            np.testing.assert_allclose(scales, largest / 127, rtol=1e-6)
        else:
            scales = np.moveaxis(np.asarray(kept.scales), range(len(places)), places)
            scales = np.repeat(scales, leaf.group, places[-1])
        values = np.asarray(kept.values) * scales
        assert (np.abs(values - np.asarray(exact)) <= scales * 0.5001).all()
        return jax.numpy.asarray(values)

    judge = Engine(original.layout, small.layout.build(widened))
    expected = judge.logits(ids)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(small.weights))
    full = sum(leaf.nbytes for leaf in jax.tree.leaves(engine(folders[name], "tensor=1").weights))
    assert quantize == "int4" or held < 0.35 * full
    assert held == small.layout.bytes_per_device("float32")
    for mesh in ("tensor=8", "data=2,sequence=2,tensor=2"):
        elsewhere = Engine.load(folders[name], mesh, quantize=quantize).logits(ids)
        assert np.abs(elsewhere - found).max() <= 1e-5 * np.abs(found).max()


def test_int4_tokens_are_the_same_on_meshes_alone_and_without_a_cache(folders: dict[str, Path]) -> None:
    config = SamplingConfig(8, temperature=0.7, seed=[1, 2, 3, 4], log_probabilities=True)
    ids, mask = ragged(500)
    whole = Engine.load(folders["qwen2"], "tensor=1", quantize="int4")
    expected = whole.generate_tokens(ids, mask, config)
    found = [whole.generate_tokens(ids, mask, config.replace(use_cache=False))]
    for mesh in ("tensor=2", "data=2,sequence=2,tensor=2"):
        found.append(Engine.load(folders["qwen2"], mesh, quantize="int4").generate_tokens(ids, mask, config))
    for one in found:
        np.testing.assert_array_equal(one.sequences, expected.sequences)
        np.testing.assert_allclose(one.log_probabilities, expected.log_probabilities, atol=1e-4)  # type: ignore[arg-type]
    alone = whole.generate_tokens(ids[2:3], mask[2:3], config.replace(seed=[3]))
    np.testing.assert_array_equal(alone.sequences[0], expected.sequences[2])


def test_weights_are_replaced_without_compiling(folders: dict[str, Path], tmp_path: Path) -> None:
    torch.manual_seed(9)
    other = torch_model("qwen2")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    other.save_pretrained(tmp_path)
    ids, mask = ragged(515)
    config = SamplingConfig(max_new_tokens=5)
    own, fresh = Engine.load(folders["qwen2"], "tensor=4"), Engine.load(tmp_path, "tensor=4")
    before, expected = own.generate_tokens(ids, mask, config), fresh.generate_tokens(ids, mask, config)
    old = own.weights
    own.replace_weights(tmp_path)
    found = own.generate_tokens(ids, mask, config)
    assert found.stats.compiled_programs == 0
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    own.replace_weights(jax.tree.map(np.asarray, old))
    np.testing.assert_array_equal(own.generate_tokens(ids, mask, config).sequences, before.sequences)
    first, *others = old.layers
    wrong = {
        r"layers\.0\.q_proj is float32": (first.replace(q_proj=first.q_proj[:1]), *others),
        "36 more arrays": (*old.layers, *old.layers),
        "a Qwen2Weights pytree with a tuple of layers": jax.tree.map(lambda *layers: np.stack(layers), *old.layers),
        "pytree with a tuple of layers": others,
        r"layers\.0\.q_proj is torch\.Tensor; expected an array of NumPy or JAX": (
            first.replace(q_proj=torch.tensor(np.asarray(first.q_proj))),
            *others,
        ),
    }
    for message, layers in wrong.items():
        with pytest.raises(InputError, match=message):
            own.replace_weights(old.replace(layers=layers))
    with pytest.raises(InputError, match=r"the model differs from this engine's \(architecture: qwen2 and gpt2"):
        own.replace_weights(folders["gpt2"])
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"rope_theta": 77.0, "rope_parameters": None}))
    with pytest.raises(InputError, match=r"rope_theta: [\d.]+ and 77"):
        own.replace_weights(tmp_path)
    np.testing.assert_array_equal(own.generate_tokens(ids, mask, config).sequences, before.sequences)
