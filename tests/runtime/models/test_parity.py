"""Parity with PyTorch: the forward pass against transformers' Qwen2 with a bidirectional mask, module by module.

Each module gets exactly the input of the reference's module, so a difference is caused by that module. Both
models are shrunk; the second has the 28 query and 4 KV heads of the real ones, and a vocabulary that no mesh divides.

Dimension letters: B batch, S sequence, K kv heads, G query heads per KV head, H head dim, V vocab.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from runtime.engine import Engine
from runtime.models import layers, qwen2, transformer
from runtime.models.attention import dot_product_attention
from runtime.models.forward import Forward

GOLDEN = Path(__file__).parents[2] / "golden" / "dream_tiny"
MODELS = ("golden", "heads_28_4")
ONE_DEVICE = "data=1,sequence=1,tensor=1"
MESHES = (ONE_DEVICE, "tensor=8", "sequence=2,tensor=2")

# For one module in float32: a few units in the last place of activations of magnitude 1 to 10.
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}
# For all layers together, relative to the largest logit.
FLOAT32_LOGITS = 1e-5

# One bfloat16 rounding has an error of up to 2^-9 = 0.2 %. A module rounds its products, sums and results a
# handful of times, where compilers decide; 1 % of the output's norm allows this, but no mistake.
BFLOAT16_MODULE = 1e-2
# Within a layer, and over all layers and the head, roundings add up; PyTorch's own error here is 0.6 to 1.3 %.
BFLOAT16_SEVERAL = 2e-2
# In any case, our error must not be much larger than PyTorch's against the same reference of higher precision.
ERROR_RATIO = 1.5

# Compiled as in a whole forward pass.
embed = jax.jit(qwen2.Qwen2Weights.embed, static_argnums=1)
rms_norm = jax.jit(layers.rms_norm, static_argnums=2)
project_qkv = jax.jit(qwen2.Qwen2Layer.project_qkv, static_argnums=1)
attention = jax.jit(dot_product_attention, static_argnums=(0, 1))
output_projection = jax.jit(layers.output_projection, static_argnums=0)
gated_mlp = jax.jit(layers.gated_mlp, static_argnums=0)
run_layer = jax.jit(transformer.run_layer, static_argnums=0)
hidden_states = jax.jit(transformer.hidden_states, static_argnums=0)
project_logits = jax.jit(transformer.project_logits, static_argnums=0)

ROWS, WIDTH = 3, 21
LENGTHS = (21, 13, 1)


def save_random_model(folder: Path) -> None:
    """Save a random model with 28 query and 4 KV heads, in which no bias is zero and no norm scale is one."""
    config = {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "vocab_size": 331,
        "hidden_size": 224,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-06,
        "hidden_act": "silu",
        "mask_token_id": 330,
        "pad_token_id": 329,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def draw(name: str, like: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(like.shape, generator=generator)
        if name.endswith("norm.weight"):
            return 1.0 + 0.3 * noise
        return noise if like.ndim == 1 or "embed" in name else noise / like.shape[1] ** 0.5

    with torch.device("meta"):
        empty = transformers.Qwen2ForCausalLM(reference_config(folder)).state_dict()
    save_file({name: draw(name, tensor) for name, tensor in empty.items()}, folder / "model.safetensors")


def reference_config(folder: Path) -> transformers.Qwen2Config:
    raw = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen2"}
    return transformers.Qwen2Config(**raw, attn_implementation="eager")


@dataclass
class Reference:
    """The same weights in PyTorch, with the inputs and outputs of its modules in one run."""

    folder: Path
    dtype: torch.dtype = torch.float32
    rounded: bool = False  # weights rounded to bfloat16 first: the float32 truth of a bfloat16 run

    @cached_property
    def model(self) -> transformers.Qwen2ForCausalLM:
        model = transformers.Qwen2ForCausalLM(reference_config(self.folder)).eval()
        weights = load_file(self.folder / "model.safetensors")
        if self.rounded:
            weights = {name: tensor.bfloat16().float() for name, tensor in weights.items()}
        model.load_state_dict(weights, strict=True)
        # Only parameters are cast: the rotary frequencies stay in float32, as after from_pretrained.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.dtype)
        return model

    @torch.no_grad()
    def logits(self, ids: np.ndarray, mask: np.ndarray | None = None, causal: bool = False) -> np.ndarray:
        """Logits float32 ``[B, S, V]``, with the original code's positions for left-padded rows."""
        keep = torch.from_numpy(np.ones_like(ids) if mask is None else mask).bool()
        visible = keep[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
        if causal:
            visible = visible & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        additive = torch.zeros(visible.shape, dtype=self.dtype).masked_fill(~visible, torch.finfo(self.dtype).min)
        positions = (keep.long().cumsum(-1) - 1).masked_fill(~keep, 1)
        return self.model(torch.from_numpy(ids), attention_mask=additive, position_ids=positions).logits.float().numpy()

    def record(self, ids: np.ndarray) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Record input and output of every module in one run, by the module's name."""
        found: dict[str, tuple[jax.Array, jax.Array]] = {}

        def hook(name: str):
            def keep(_, arguments: tuple, keywords: dict, output: object) -> None:
                given = arguments[0] if arguments else keywords["hidden_states"]
                given, output = (value[0] if isinstance(value, tuple) else value for value in (given, output))
                found[name] = (to_jax(given), to_jax(output))

            return keep

        handles = [
            module.register_forward_hook(hook(name), with_kwargs=True)
            for name, module in self.model.named_modules()
            if name and not name.endswith(("layers", "rotary_emb", "act_fn")) and name != "model"
        ]
        self.logits(ids)
        for handle in handles:
            handle.remove()
        return found


def to_jax(tensor: torch.Tensor) -> jax.Array:
    dtype = {torch.bfloat16: jnp.bfloat16, torch.float32: jnp.float32}.get(tensor.dtype)
    return jnp.asarray(tensor.detach().float().numpy(), dtype) if dtype else jnp.asarray(tensor.numpy(), jnp.int32)


def to_torch(array: jax.Array) -> torch.Tensor:
    return torch.from_numpy(np.array(array, np.float32)).to(getattr(torch, str(array.dtype)))


def relative_error(found: np.ndarray, truth: np.ndarray) -> float:
    """Norm of the difference, divided by the norm of the reference."""
    found, truth = np.asarray(found, np.float64), np.asarray(truth, np.float64)
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


def assert_same_logits(found: np.ndarray, expected: np.ndarray, message: str = "") -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=FLOAT32_LOGITS * np.abs(expected).max(), err_msg=message)


@cache
def engine_on(folder: Path, mesh: str, dtype: str) -> Engine:
    return Engine.load(folder, mesh=mesh, dtype=dtype)


@pytest.fixture(scope="module")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "heads_28_4"
    save_random_model(folder)
    return folder


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, random_folder: Path) -> Path:
    return GOLDEN if request.param == "golden" else random_folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def ids(reference: Reference) -> np.ndarray:
    """Random tokens ``[B, S]``, including mask tokens."""
    generator = np.random.default_rng(1)
    tokens = generator.integers(0, reference.model.config.vocab_size, (ROWS, WIDTH))
    mask_token = json.loads((reference.folder / "config.json").read_text())["mask_token_id"]
    return np.where(generator.random(tokens.shape) < 0.3, mask_token, tokens)


@pytest.fixture(scope="module")
def left_padding() -> np.ndarray:
    """Attention mask ``[B, S]`` of left-padded rows."""
    return (np.arange(WIDTH) >= WIDTH - np.array(LENGTHS)[:, None]).astype(np.int64)


@pytest.mark.parametrize("change", ["last token", "biases", "causal", "rope_theta", "norm"])
def test_the_reference_is_bidirectional_and_sensitive(folder: Path, ids: np.ndarray, change: str) -> None:
    """Each feature that could be missing unnoticed changes the reference's first logits far beyond the tolerance."""
    reference, changed = Reference(folder), Reference(folder)
    tokens = ids.copy()
    with torch.no_grad():
        if change == "last token":
            tokens[:, -1] = (tokens[:, -1] + 1) % 200
        elif change == "rope_theta":
            changed.model.model.rotary_emb.inv_freq *= 0.9
        elif change in ("biases", "norm"):
            for name, parameter in changed.model.named_parameters():
                if name.endswith("bias"):
                    parameter *= change != "biases"
                if change == "norm" and name.endswith("layernorm.weight"):
                    parameter.fill_(1.0)
    difference = np.abs(reference.logits(ids) - changed.logits(tokens, causal=change == "causal"))[:, 0].max()
    assert difference > 100 * FLOAT32["atol"]


def check_modules(reference: Reference, ids: np.ndarray, compare) -> None:
    """Run each of our functions on the reference's inputs, and call ``compare(name, found, expected)``."""
    dtype = str(reference.dtype).removeprefix("torch.")
    engine = engine_on(reference.folder, ONE_DEVICE, dtype)
    weights, config, layout = engine.weights, engine.config, engine.layout
    forward = Forward(layout)
    seen = reference.record(ids)
    B, S = ids.shape
    K, G, H = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim
    lengths = jnp.full((B,), S, jnp.int32)
    tokens = jnp.asarray(ids, jnp.int32)

    def output(name: str) -> jax.Array:
        return seen[name][1]

    def given(name: str) -> jax.Array:
        return seen[name][0]

    compare("embed", embed(weights, forward, tokens, jnp.arange(S)), output("model.embed_tokens"))
    rotary = layers.rotary_tables(config.head_dim, config.rope_theta, jnp.arange(S), weights.embedding.dtype)
    cosine, sine = reference.model.model.rotary_emb(to_torch(rotary[0]), torch.arange(S)[None])
    compare("cosine", rotary[0], to_jax(cosine[0]))
    compare("sine", rotary[1], to_jax(sine[0]))
    for number in range(config.num_layers):
        layer = weights.layers[number]
        name = f"model.layers.{number}"
        norm = rms_norm(given(f"{name}.input_layernorm"), layer.input_norm, config.norm_eps)
        compare(f"{name} input norm", norm, output(f"{name}.input_layernorm"))

        q, k, v = project_qkv(layer, forward, given(f"{name}.input_layernorm"), rotary)
        # The reference rotates outside its modules, so apply its own function, with the head axis first.
        flat = {which: output(f"{name}.self_attn.{which}_proj").reshape(B, S, -1, H) for which in "qkv"}
        heads_first = (to_torch(flat["q"]).transpose(1, 2), to_torch(flat["k"]).transpose(1, 2))
        rotated = [to_jax(part.transpose(1, 2)) for part in apply_rotary_pos_emb(*heads_first, cosine, sine)]
        expected = (rotated[0].reshape(B, S, K, G, H), rotated[1], flat["v"])
        compare(f"{name} queries", q, expected[0])
        compare(f"{name} keys", k, expected[1])
        compare(f"{name} values", v, expected[2])

        attended = attention("xla", layout, *expected, lengths)
        merged = given(f"{name}.self_attn.o_proj")
        compare(f"{name} attention", attended.reshape(B, S, -1), merged)
        projected = output_projection(forward, layer.o_proj, merged.reshape(B, S, K, G, H))
        compare(f"{name} output projection", projected, output(f"{name}.self_attn.o_proj"))

        place = f"{name}.post_attention_layernorm"
        norm = rms_norm(given(place), layer.post_attention_norm, config.norm_eps)
        compare(f"{name} post-attention norm", norm, output(place))
        mlp = gated_mlp(forward, given(f"{name}.mlp"), layer.gate_proj, layer.up_proj, layer.down_proj)
        compare(f"{name} MLP", mlp, output(f"{name}.mlp"))
        compare(f"{name} layer", run_layer(forward, layer, given(name), lengths, rotary)[0], output(name))
    norm = rms_norm(given("model.norm"), weights.final_norm, config.norm_eps)
    compare("final norm", norm, output("model.norm"))
    compare("hidden states", hidden_states(forward, weights, tokens, lengths), output("model.norm"))
    logits = project_logits(forward, weights, given("lm_head"))[..., : config.vocab_size]
    compare("logits", logits, output("lm_head"))


def test_every_module_in_float32(reference: Reference, ids: np.ndarray) -> None:
    def compare(name: str, found: jax.Array, expected: jax.Array) -> None:
        assert found.dtype == expected.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, **FLOAT32, err_msg=name)

    check_modules(reference, ids, compare)


def test_every_module_in_bfloat16(folder: Path, ids: np.ndarray) -> None:
    def compare(name: str, found: jax.Array, expected: jax.Array) -> None:
        if name != "logits":  # ours are rounded too, then widened for sampling
            assert found.dtype == expected.dtype == jnp.bfloat16
        limit = BFLOAT16_SEVERAL if name.endswith(("block", "hidden states")) else BFLOAT16_MODULE
        assert relative_error(found, expected) <= limit, name

    check_modules(Reference(folder, torch.bfloat16), ids, compare)


@pytest.mark.parametrize("mesh", MESHES)
def test_logits_in_float32(folder: Path, reference: Reference, ids: np.ndarray, mesh: str) -> None:
    """Both agree, and ours are as close as PyTorch's to float64 logits."""
    engine = engine_on(folder, mesh, "float32")
    found, expected = engine.logits(ids), reference.logits(ids)
    assert_same_logits(found, expected)
    truth = Reference(folder, torch.float64).logits(ids)
    assert relative_error(found, truth) <= ERROR_RATIO * relative_error(expected, truth)


@pytest.mark.parametrize("mesh", [ONE_DEVICE, "data=2,sequence=2,tensor=2"])
def test_left_padded_rows(
    folder: Path, reference: Reference, ids: np.ndarray, left_padding: np.ndarray, mesh: str
) -> None:
    """A padded row equals the row alone, here and in the reference, and both agree."""
    engine = engine_on(folder, mesh, "float32")
    found, expected = engine.logits(ids, left_padding), reference.logits(ids, left_padding)
    for row, length in enumerate(LENGTHS):
        real = slice(WIDTH - length, None)
        alone = ids[row : row + 1, real]
        assert_same_logits(found[row, real], expected[row, real], f"row {row}")
        assert_same_logits(found[row, real], engine.logits(alone)[0], f"row {row} alone, ours")
        assert_same_logits(found[row, real], reference.logits(alone)[0], f"row {row} alone, the reference's")
        assert not found[row, : WIDTH - length].any()


@pytest.mark.parametrize("mesh", [ONE_DEVICE, "tensor=8"])
def test_logits_in_bfloat16(folder: Path, ids: np.ndarray, left_padding: np.ndarray, mesh: str) -> None:
    """The float32 reference uses the weights rounded to bfloat16, so the difference is the error of the arithmetic."""
    real = left_padding.astype(bool)
    truth = Reference(folder, rounded=True).logits(ids, left_padding)[real]
    theirs = relative_error(Reference(folder, torch.bfloat16).logits(ids, left_padding)[real], truth)
    engine = engine_on(folder, mesh, "bfloat16")
    ours = relative_error(engine.logits(ids, left_padding)[real], truth)
    assert theirs > 1e-3, "the reference did not run in bfloat16"
    assert ours <= BFLOAT16_SEVERAL
    assert ours <= ERROR_RATIO * theirs
