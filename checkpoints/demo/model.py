"""The demo's model as a transformers module, and the files of its checkpoint folder.

The model is transformers' Qwen2 with bidirectional attention. Its weights have Dream's names and shapes.
Dimension letters: B rows, S canvas length, K KV heads, G query heads per KV head, H head dimension.
"""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from tokenizers import Tokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from checkpoints.demo import corpus
from checkpoints.demo.recipe import Recipe
from checkpoints.local_files import replace_file


def bidirectional_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float = 1.0,
    **unused: object,
) -> tuple[torch.Tensor, None]:
    """Attend without a mask: query [B, K*G, S, H], key and value [B, K, S, H] -> [B, S, K*G, H].

    Two batched products compute it. On a CPU, the backward pass of torch's fused attention takes longer than the rest
    of the model together.
    """
    B, N, S, H = query.shape
    K = key.shape[1]
    scores = torch.bmm((query * scaling).reshape(B * K, N // K * S, H), key.reshape(B * K, S, H).transpose(1, 2))
    mixed = torch.bmm(torch.softmax(scores, -1), value.reshape(B * K, S, H))
    return mixed.view(B, N, S, H).transpose(1, 2).contiguous(), None


def build_model(recipe: Recipe) -> transformers.Qwen2ForCausalLM:
    """Return a newly initialised float32 Qwen2 with bidirectional attention."""
    ALL_ATTENTION_FUNCTIONS.register("bidirectional", bidirectional_attention)
    config = transformers.Qwen2Config(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.kv_heads * recipe.group,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="bidirectional",
    )
    return transformers.Qwen2ForCausalLM(config)


def dream_config(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the contents of config.json, with Dream's keys."""
    end = corpus.token_id(tokenizer, corpus.END)
    return {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "vocab_size": recipe.vocabulary,
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.kv_heads * recipe.group,
        "num_key_value_heads": recipe.kv_heads,
        "max_position_embeddings": 2048,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-06,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 28,
        "mask_token_id": corpus.token_id(tokenizer, corpus.MASK),
        "pad_token_id": end,
        "bos_token_id": end,
        "eos_token_id": end,
    }


def save(folder: Path, files: dict[str, Any], weights: dict[str, torch.Tensor] | None = None) -> None:
    """Write JSON files and weights (as bfloat16). Each file is replaced atomically, so the folder stays loadable."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
        replace_file(folder / name, [text.encode()])
    if weights is not None:
        tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in weights.items()}
        replace_file(folder / "model.safetensors", [safetensors.torch.save(tensors, metadata={"format": "pt"})])


def tokenizer_files(tokenizer: Tokenizer, recipe: Recipe) -> dict[str, Any]:
    """Return the contents of tokenizer.json, tokenizer_config.json and generation_config.json."""
    end = corpus.token_id(tokenizer, corpus.END)
    mask = corpus.token_id(tokenizer, corpus.MASK)
    named = (corpus.END, corpus.PAD, corpus.MASK)
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": corpus.END,
            "pad_token": corpus.PAD,
            "mask_token": corpus.MASK,
            "additional_special_tokens": [t for t in corpus.SPECIAL_TOKENS if t not in named],
            "clean_up_tokenization_spaces": False,
            "model_max_length": 2048,
        },
        "config.json": dream_config(recipe, tokenizer),
        "generation_config.json": {"eos_token_id": end, "pad_token_id": end, "mask_token_id": mask},
    }
