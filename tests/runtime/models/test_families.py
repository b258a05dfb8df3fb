"""The records of the model families, and what other code reads from them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from checkpoints import DEMO, open_folder
from runtime import DiffusionConfig, Engine, InputError, TextTokenizer, end_tokens, place_suffix
from runtime.execution.rows import check_kind, default_config, with_model_blocks
from runtime.execution.scoring import gather_logits, shifted_logits
from runtime.models.config import ConfigError, Family, transformer_config
from runtime.models.declarations import ModelLayout
from runtime.models.dream import DREAM
from runtime.models.families import FAMILIES, model_layout, parse_config
from runtime.models.gpt2 import GPT2
from runtime.models.qwen2 import QWEN2
from runtime.planner.presets import PRESETS, preset
from sharding.mesh import MeshSpec
from tests import golden_cases


def test_records_are_told_apart() -> None:
    kinds = {(family.model_type, family.config_key) for family in FAMILIES}
    assert len({family.name for family in FAMILIES}) == len(kinds) == len(FAMILIES)
    assert len({family.model_type for family in FAMILIES}) == len(FAMILIES) - 1, "Dream and DreamOn share theirs"
    assert sum(len(family.presets) for family in FAMILIES) == len(PRESETS)


def test_completions_end_at_the_tokens_of_the_familys_record() -> None:
    """Of one tokenizer's tokens, Dream's record names one more than Qwen2's. GPT-2's names none around a suffix."""
    folder = open_folder(str(DEMO), weights=False)
    tokenizer, model = TextTokenizer.from_folder(folder), parse_config(folder.config)
    assert tokenizer is not None
    dream, qwen2 = (end_tokens(replace(model, family=one), folder, tokenizer) for one in (DREAM, QWEN2))
    assert set(dream) == {*qwen2, *tokenizer.known_ids(["<|dlm_pad|>"])} != set(qwen2)
    with pytest.raises(InputError, match="suffix is not available for gpt2 models") as found:
        place_suffix(tokenizer, replace(model, family=GPT2), [1], [2], chat=False)
    assert found.value.field == "suffix"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_presets_are_of_their_family(family: Family) -> None:
    for name in family.presets:
        config = preset(name)
        assert config.family is family
        assert config.attention_mask.kind == family.attention
        assert (config.mask_token_id >= 0) == (family.objective == "masked_diffusion")
        assert (family.schedule is not None) == (family.objective == "masked_diffusion")


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        ("DiffuCoder-7B-Base", 0.2),
        ("DiffuCoder-7B-Instruct", 0.3),
        ("apple/DiffuCoder-7B-cpGRPO", 0.4),
        ("Dream-org/Dream-v0-Base-7B", 0.2),
        ("Dream-org/Dream-v0-Instruct-7B", 0.2),
        ("Dream-org/Dream-Coder-v0-Instruct-7B", 0.1),
        ("", 0.2),
    ],
)
def test_published_settings_follow_the_kind_of_checkpoint(name: str, temperature: float) -> None:
    found = DREAM.published_settings(name)
    assert DiffusionConfig(max_new_tokens=64, steps=64, **found) == DiffusionConfig.published(64, temperature)
    assert QWEN2.published_settings(name) == {}


def test_published_settings_are_those_of_the_record_alone() -> None:
    assert DiffusionConfig.published(64) == DiffusionConfig(
        64, steps=64, algorithm="entropy", temperature=0.2, top_p=0.95, top_k=50, alg_temp=0.0
    )
    for family in FAMILIES:
        if family.objective == "masked_diffusion":
            found = DiffusionConfig.published_for(family, "", max_new_tokens=64)
            # A canvas of variable length has no number of steps.
            steps = {} if family.variable_length else {"steps": 64}
            assert found == DiffusionConfig(64, **steps, **family.published_settings(""))
            assert found.algorithm in family.algorithms
            assert DiffusionConfig.published_for(family, "", steps=3, top_p=0.5).replace(
                steps=256, top_p=found.top_p
            ) == (found.replace(max_new_tokens=256, steps=256))


@pytest.mark.parametrize("name", PRESETS)
def test_a_default_configuration_suits_its_model(name: str) -> None:
    model = preset(name)
    check_kind(model, with_model_blocks(default_config(model), model))


@pytest.mark.parametrize("name", ["diffucoder-7b", "llada-8b", "sdar-8b", "dreamon-7b"])
@pytest.mark.parametrize("source", ["diffucoder-7b", "sdar-8b", "dreamon-7b"])
def test_a_configuration_of_another_model_has_what_depends_on_this_one(source: str, name: str) -> None:
    model = preset(name)
    config = with_model_blocks(default_config(preset(source)), preset(source))
    found = with_model_blocks(config, model)
    assert isinstance(found, DiffusionConfig)
    assert found.variable_length == model.family.variable_length
    assert bool(found.attention_block_length) == model.family.block_causal


def test_a_mask_token_is_the_configurations_or_the_familys() -> None:
    raw = {key: value for key, value in PRESETS["diffucoder-7b"].items() if key != "mask_token_id"}
    with pytest.raises(ConfigError, match='"mask_token_id" is missing'):
        parse_config(raw)
    assert transformer_config(replace(DREAM, mask_token_id=7), raw).mask_token_id == 7


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("qwen3-8b", {"architectures": ["SDARForCausalLM"]}, "model_type is 'qwen3', but architectures is ['SDARFor"),
        ("qwen2.5-7b", {"architectures": ["Fast_dLLM_QwenForCausalLM"]}, "is of model_type 'Fast_dLLM_Qwen'"),
        ("dream-7b", {"architectures": ["LLaDAModelLM"]}, "is of model_type 'llada'"),
        ("sdar-8b", {"architectures": ["SDARMoeForCausalLM"]}, "expected 'SDARForCausalLM'"),
        ("qwen2.5-7b", {"architectures": ["Qwen2ForSequenceClassification"]}, "expected 'Qwen2ForCausalLM'"),
        ("llada-8b", {"architectures": "LLaDAModelLM"}, "expected a list of class names"),
        ("dream-7b", {"delete_token_id": 151643}, '"delete_token_id" requires "expand_token_id"'),
    ],
)
def test_configurations_of_two_families_are_refused(name: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_config({**PRESETS[name], **change})


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_names_the_class_of_its_family_or_none(name: str) -> None:
    family = preset(name).family
    for named in ([family.architecture], [], None):
        assert parse_config({**PRESETS[name], "architectures": named}).family is family


# Small models with the heads of published ones: 32 KV heads, 32 query heads over 8, 28 over 4, each with more devices
# than KV heads except the first.
HEADS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llada, tensor=16": (
        "llada-8b",
        {"d_model": 64, "n_layers": 1, "mlp_hidden_size": 64, "vocab_size": 128, "embedding_size": 128},
        {"algorithm": "low_confidence", "block_length": 4, "cache": "dual"},
    ),
    "sdar, tensor=16": (
        "sdar-8b",
        {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64, "head_dim": 4, "vocab_size": 128},
        {"algorithm": "maskgit_plus", "cache": "exact"},
    ),
    "fast_dllm_v2, sequence=2,tensor=8": (
        "fast_dllm_v2-7b",
        {"hidden_size": 112, "num_hidden_layers": 1, "intermediate_size": 64, "bd_size": 4, "vocab_size": 128},
        {"algorithm": "maskgit_plus", "cache": "exact"},
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_of_published_models_on_16_devices(name: str) -> None:
    published, sizes, settings = HEADS[name]
    special = {"mask_token_id": 127, "eos_token_id": 126, "pad_token_id": 126, "torch_dtype": "float32"}
    config = parse_config({**PRESETS[published], **sizes, **special})
    assert (config.num_heads, config.num_kv_heads) == (preset(published).num_heads, preset(published).num_kv_heads)
    prompts = np.random.default_rng(0).integers(0, 126, (2, 7)).astype(np.int32)
    request = DiffusionConfig(8, steps=8, suppress_mask=True, **settings)
    one, many = (Engine.random(config, mesh, "float32") for mesh in ("data=1", name.partition(", ")[2]))
    assert many.layout.mesh.size == 16
    expected = one.generate_tokens(prompts, None, request)
    found = many.generate_tokens(prompts, None, request)
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    np.testing.assert_array_equal(found.commit_steps, expected.commit_steps)
    np.testing.assert_allclose(many.logits(prompts), one.logits(prompts), atol=1e-4)


@pytest.mark.parametrize("name", PRESETS)
def test_cost_of_a_layer_is_that_of_its_matrices(name: str) -> None:
    config = preset(name)
    layout = model_layout(config)

    def layer_parameters(layout: ModelLayout) -> float:
        return sum(np.prod(leaf.shape) for leaf in layout.leaves if leaf.layers) / config.num_layers

    cost = layout.layer_cost
    assert cost.flops_per_position == 2 * layer_parameters(layout)
    assert cost.attention_flops_per_pair == 4 * config.num_heads * config.head_dim
    half = model_layout(config, MeshSpec(tensor=2)).layer_cost
    assert half.flops_per_position < 0.51 * cost.flops_per_position
    assert half.attention_flops_per_pair == cost.attention_flops_per_pair / 2
    assert [(one.kind, one.times) for one in cost.tensor_collectives] == [("all-reduce", 2)]


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_the_prediction_for_a_position_is_the_output_so_many_before(offset: int) -> None:
    config = golden_cases.engine().config
    changed = replace(config, family=replace(config.family, prediction_offset=offset))
    engine = Engine.random(changed, "data=1", "float32", devices=jax.devices()[:1])
    canvas, lengths = np.arange(64, dtype=np.int32)[None], np.array([64], np.int32)
    logits, found = (read(engine.runner, canvas, lengths) for read in (gather_logits, shifted_logits))
    for position in (0, 1, 2, 5, 63):
        source = position if position < offset else position - offset
        np.testing.assert_array_equal(found[:, position], logits[:, source])
