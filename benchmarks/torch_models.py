"""The PyTorch side of comparisons: transformers' models with the same weights, and the published decoding loop.

A family names its model class in transformers. A bidirectional model is this class without the causal mask, on its fast
path: fused attention (``sdpa``) without a mask. ``diffusion_generate`` is a direct implementation of the published
decoding loop, with full logits. On CPU, matrix products in float32 run in one of two libraries: PyTorch's default, or
oneDNN through ``torch.utils.mkldnn``. Which one is faster depends on the processor.

Dimension letters: B batch, S canvas, P prompt, N new tokens, M masked positions of all rows, V vocab.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.decoding.parameters import DiffusionConfig
from runtime.models.config import ModelConfig
from runtime.models.families import parse_config
from sharding.errors import InputError

if TYPE_CHECKING:
    import torch

# PyTorch's libraries for matrix products.
BACKENDS = ("default", "onednn")


def import_torch() -> Any:
    """Import PyTorch with transformers.

    Raises:
      InputError: they are not installed.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise InputError(
            f"the comparison requires PyTorch and transformers: pip install torch transformers ({error})"
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return torch


def torch_device(torch: Any, platform: str) -> str:
    """Return PyTorch's name of the device that JAX calls ``cpu`` or ``gpu``.

    Raises:
      InputError: PyTorch does not support the device.
    """
    if platform == "cpu":
        return "cpu"
    if platform == "gpu" and torch.cuda.is_available():
        return "cuda"
    raise InputError(
        f"JAX runs on {platform}, and PyTorch {torch.__version__} does not; JAX_PLATFORMS=cpu compares both on the CPU"
    )


def wait_for(torch: Any, device: str) -> None:
    """Wait until PyTorch's device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def import_model_class(config: ModelConfig) -> Any:
    """Import the class in transformers of a model's family."""
    import transformers

    assert config.family.transformers_class is not None
    return getattr(transformers, config.family.transformers_class)


def torch_model(config: dict[str, Any], dtype: str, device: str = "cpu", seed: int = 0) -> Any:
    """Make a random model in PyTorch, on its device, in evaluation mode.

    Args:
      config: contents of a ``config.json``, of a family with a model class in transformers.
      dtype: dtype of weights and activations.
      device: PyTorch's name of the device.
      seed: seed of the random weights.

    Raises:
      InputError: this version of transformers cannot turn its causal mask off.
    """
    torch = import_torch()
    parsed = parse_config(config)
    model_class = import_model_class(parsed)
    config_class = model_class.config_class
    own = config_class(**config | {"model_type": config_class.model_type, "attn_implementation": "sdpa"})
    # Weights are larger than usual, so that masked positions differ by much more than rounding and tokens can be
    # compared.
    own.initializer_range = 2 * own.hidden_size**-0.5
    both_ways = parsed.attention_mask.kind == "bidirectional"
    if both_ways:
        own.is_causal = False  # transformers then makes no mask at all
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = model_class(own).eval()
    finally:
        torch.set_default_dtype(before)
    with torch.inference_mode():
        model.model.embed_tokens.weight.normal_()
    if both_ways:
        _attend_both_ways(torch, model)
    return model


def _attend_both_ways(torch: Any, model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with torch.inference_mode():
        probe = torch.arange(8, device=model.device)[None]
        changed = torch.where(probe == 7, 9, probe)
        if torch.equal(model(probe).logits[:, 0], model(changed).logits[:, 0]):
            raise InputError("this version of transformers keeps its causal mask; 5.0 or newer can switch it off")


def save_torch_model(model: Any, config: dict[str, Any], folder: Path) -> None:
    """Write a PyTorch model's weights as a checkpoint with this ``config.json``."""
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")


def gpt2_model(dtype: str, device: str = "cpu", seed: int = 0) -> Any:
    """Make a random GPT-2 of 124 million parameters in PyTorch, in evaluation mode, without an end token."""
    torch = import_torch()
    import transformers

    torch.manual_seed(seed)
    config = transformers.GPT2Config(eos_token_id=None, bos_token_id=None, pad_token_id=0, attn_implementation="sdpa")
    # Larger than usual, so that greedy tokens do not repeat.
    config.initializer_range = 2 * config.n_embd**-0.5
    return transformers.GPT2LMHeadModel(config).to(device=device, dtype=getattr(torch, dtype)).eval()


def backends(device: str, dtype: str) -> tuple[str, ...]:
    """Return PyTorch's libraries for matrix products that a comparison has to choose from."""
    return BACKENDS if device == "cpu" and dtype == "float32" else BACKENDS[:1]


def run_in_onednn(torch: Any, model: Any) -> Any:
    """Make the linear layers of a float32 module run in oneDNN, in place, and return the module.

    Each layer's weights are copied into oneDNN's layout, and its own are dropped. This includes the layers of GPT-2,
    which transformers writes as ``Conv1D``.
    """
    from torch.utils.mkldnn import MkldnnLinear
    from transformers.pytorch_utils import Conv1D

    with torch.no_grad():
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                layer = child
                if isinstance(child, Conv1D):
                    layer = torch.nn.Linear(child.nx, child.nf, device="meta")
                    layer.weight, layer.bias = torch.nn.Parameter(child.weight.t().contiguous()), child.bias
                if isinstance(layer, torch.nn.Linear):
                    setattr(module, name, MkldnnLinear(layer, torch.float32))
    return model


def with_backend(torch: Any, model: Any, backend: str) -> Any:
    """Return a model that runs its linear layers in this library: itself, or a copy that shares all other weights."""
    if backend == "default":
        return model
    return run_in_onednn(torch, copy.deepcopy(model, {id(weight): weight for weight in model.parameters()}))


def wider_copy(model: Any, dtype: str, rope_theta: float) -> Any:
    """Return a copy of a model of the Qwen2 family in a wider dtype, ``float32`` or ``float64``.

    Rotary angles are float32 in transformers, whatever the model's dtype. In a copy in float64 they are float64 too,
    with the base ``rope_theta``.
    """
    import torch

    class Rotary(torch.nn.Module):
        def forward(self, x: Any, position_ids: Any) -> tuple[Any, Any]:
            half = config.head_dim // 2
            frequencies = rope_theta ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
            angles = position_ids[..., None].to(x.dtype) * frequencies
            angles = torch.cat([angles, angles], dim=-1)
            return angles.cos(), angles.sin()

    copied = copy.deepcopy(model).to(getattr(torch, dtype))
    config = copied.config
    if dtype == "float64":
        copied.model.rotary_emb = Rotary()
    return copied


def greedy_generate(model: Any, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Greedy generation by transformers with its cache: int64 ``[B, P]`` -> ``[B, P + new_tokens]``."""
    import torch

    with torch.inference_mode():
        tokens: torch.Tensor = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
        )
    return tokens


def _predictions(torch: Any, outputs: Any, prediction_offset: int) -> Any:
    """Shift a model's outputs ``[B, S, V]``, so that those at position i are the logits of position i."""
    own, shifted = outputs[:, :prediction_offset], outputs[:, : outputs.shape[1] - prediction_offset]
    return torch.cat([own, shifted], dim=1)


def _filtered(torch: Any, logits: Any, config: DiffusionConfig) -> Any:
    """Apply temperature, top-p and top-k in the published order: ``[..., V]`` -> ``[..., V]``, dropped ones lowest."""
    lowest = torch.finfo(logits.dtype).min
    if config.temperature > 0:
        logits = logits / config.temperature
    if config.top_p is not None and config.top_p < 1.0:
        ordered, places = torch.sort(logits, descending=True)
        mass = torch.cumsum(torch.softmax(ordered, dim=-1), dim=-1)
        drop = mass > config.top_p
        drop[..., 1:] = drop[..., :-1].clone()
        drop[..., 0] = False
        drop = torch.zeros_like(drop).scatter_(-1, places, drop)
        logits = logits.masked_fill(drop, lowest)
    if config.top_k is not None:
        kth = torch.topk(logits, min(config.top_k, logits.shape[-1]))[0][..., -1, None]
        logits = logits.masked_fill(logits < kth, lowest)
    return logits


def _with_masks(torch: Any, prompt: Any, mask_token: int, new_tokens: int) -> Any:
    return torch.nn.functional.pad(prompt, (0, new_tokens), value=mask_token)


def first_log_probabilities(
    model: Any, prompt: torch.Tensor, mask_token: int, prediction_offset: int, config: DiffusionConfig
) -> torch.Tensor:
    """Compute the distributions that the first step samples from: int64 ``[B, P]`` -> float32 ``[B, N, V]``.

    Tokens that the filters drop have a log-probability of -inf. Arguments are those of :func:`diffusion_generate`.
    """
    import torch

    with torch.inference_mode():
        canvas = _with_masks(torch, prompt, mask_token, config.max_new_tokens)
        outputs = model(canvas, use_cache=False).logits
        logits = _predictions(torch, outputs, prediction_offset)[:, prompt.shape[1] :]
        kept = _filtered(torch, logits, config)
        dropped = kept == torch.finfo(kept.dtype).min
        return torch.log_softmax(kept.float().masked_fill(dropped, -torch.inf), dim=-1)


def diffusion_generate(
    model: Any, prompt: torch.Tensor, mask_token: int, prediction_offset: int, config: DiffusionConfig
) -> torch.Tensor:
    """Masked-diffusion decoding by negative entropy, as Dream and DiffuCoder publish it.

    Args:
      model: returns the logits of tokens.
      prompt: int64 ``[B, P]``, rows of one length.
      mask_token: id of the mask token.
      prediction_offset: see :class:`runtime.models.config.Family`.
      config: its numbers of new tokens and steps, ``temperature``, ``top_p``, ``top_k`` and ``eps`` are used.

    Returns:
      int64 ``[B, P + N]``.
    """
    import torch

    steps = config.steps
    with torch.inference_mode():
        canvas = _with_masks(torch, prompt, mask_token, config.max_new_tokens)
        times = torch.linspace(1.0, config.eps, steps + 1)
        for step in range(steps):
            masked = canvas == mask_token
            outputs = model(canvas, use_cache=False).logits
            logits = _filtered(torch, _predictions(torch, outputs, prediction_offset)[masked], config)
            probabilities = torch.softmax(logits, dim=-1)
            if config.temperature > 0:
                tokens = torch.multinomial(probabilities, 1)[:, 0]
            else:
                tokens = probabilities.argmax(dim=-1)
            confidence = (probabilities * torch.log(probabilities + 1e-10)).sum(dim=-1)
            left = int(masked.sum()) // len(canvas)  # the mean of the rows, as published
            count = int(left * float(1 - times[step + 1] / times[step])) if step < steps - 1 else left
            if count == 0:
                continue
            ranking = torch.full(canvas.shape, -torch.inf, dtype=confidence.dtype, device=canvas.device)
            ranking[masked] = confidence
            chosen = torch.topk(ranking, count, dim=1).indices
            filled = canvas.clone()
            filled[masked] = tokens
            canvas = canvas.scatter(1, chosen, filled.gather(1, chosen))
    return canvas
