"""The forward pass of a small Dream model in NumPy, with keys and values stored by their position on the canvas.

Dimension letters: P positions, K kv heads, G query heads per KV head, H head dim, V vocab.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


class NumpyDream:
    """A Dream model in float64. A pass computes some positions and lets them see those that the caller names."""

    def __init__(self, folder: Path, size: int) -> None:
        """Read a Hugging Face folder, and make an empty cache of ``size`` positions."""
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {
            name: value.astype(np.float64) for name, value in load_file(folder / "model.safetensors").items()
        }
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.groups, self.per_group = groups, heads // groups
        self.head_dim = self.config["hidden_size"] // heads
        shape = (self.config["num_hidden_layers"], size, groups, self.head_dim)
        self.keys, self.values = np.zeros(shape), np.zeros(shape)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scaled = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        return np.asarray(scaled * self.weights[f"{name}.weight"])

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return np.asarray(x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0))

    def _rotated(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rotate ``[P, ..., H]``."""
        half = self.head_dim // 2
        angles = positions[:, None] * self.config["rope_theta"] ** (-np.arange(half) / half)
        angles = np.concatenate([angles, angles], axis=-1).reshape(len(x), *(1,) * (x.ndim - 2), -1)
        turned = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
        return np.asarray(x * np.cos(angles) + turned * np.sin(angles))

    def run(self, tokens: np.ndarray, positions: np.ndarray, visible: np.ndarray) -> np.ndarray:
        """Run tokens ``[P]`` at positions ``[P]``, which see the positions ``visible``. Return logits ``[P, V]``.

        Keys and values of these tokens replace those that are stored at their positions.
        """
        x = self.weights["model.embed_tokens.weight"][tokens]
        for number in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{number}"
            normal = self._norm(x, f"{name}.input_layernorm")
            q, k, v = (self._linear(normal, f"{name}.self_attn.{one}_proj") for one in "qkv")
            q = self._rotated(q.reshape(len(x), self.groups, self.per_group, -1), positions)
            self.keys[number, positions] = self._rotated(k.reshape(len(x), self.groups, -1), positions)
            self.values[number, positions] = v.reshape(len(x), self.groups, -1)
            scores = np.einsum("pkgh,tkh->pkgt", q, self.keys[number, visible]) / np.sqrt(self.head_dim)
            shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
            shares /= shares.sum(axis=-1, keepdims=True)
            seen = np.einsum("pkgt,tkh->pkgh", shares, self.values[number, visible]).reshape(len(x), -1)
            x = x + self._linear(seen, f"{name}.self_attn.o_proj")
            normal = self._norm(x, f"{name}.post_attention_layernorm")
            gate = self._linear(normal, f"{name}.mlp.gate_proj")
            up = self._linear(normal, f"{name}.mlp.up_proj")
            x = x + self._linear(gate / (1 + np.exp(-gate)) * up, f"{name}.mlp.down_proj")
        return self._linear(self._norm(x, "model.norm"), "lm_head")
