"""The PyTorch side of comparisons: transformers' models with the same weights, and the published decoding loop.

A family names its model class in transformers. A bidirectional model is this class without the causal mask, on its fast
path: fused attention (``sdpa``) without a mask. ``diffusion_generate`` is a direct implementation of the published
decoding loop, with full logits.

Dimension letters: B batch, S canvas, P prompt, V vocab.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.models.families import parse_config
from sharding.errors import InputError

if TYPE_CHECKING:
    import torch


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
    import transformers

    parsed = parse_config(config)
    assert parsed.family.transformers_class is not None
    model_class = getattr(transformers, parsed.family.transformers_class)
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
    return transformers.GPT2LMHeadModel(config).to(device=device, dtype=getattr(torch, dtype)).eval()


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


def diffusion_generate(
    model: Any,
    prompt: torch.Tensor,
    mask_token: int,
    prediction_offset: int,
    new_tokens: int,
    steps: int,
    top_p: float | None = None,
    top_k: int | None = None,
    eps: float = 1e-3,
) -> torch.Tensor:
    """Masked-diffusion decoding by negative entropy at temperature 0, as Dream and DiffuCoder publish it.

    Args:
      model: returns the logits of tokens.
      prompt: int64 ``[B, P]``, rows of one length.
      mask_token: id of the mask token.
      prediction_offset: see :class:`runtime.models.config.Family`.
      new_tokens: positions to fill.
      steps: forward passes.
      top_p: top-p filter of the confidences; None for no filter.
      top_k: top-k filter of the confidences; None for no filter.
      eps: final time of the schedule.

    Returns:
      int64 ``[B, P + new_tokens]``.
    """
    import torch

    with torch.inference_mode():
        canvas = torch.nn.functional.pad(prompt, (0, new_tokens), value=mask_token)
        times = torch.linspace(1.0, eps, steps + 1)
        for step in range(steps):
            masked = canvas == mask_token
            logits = _predictions(torch, model(canvas).logits, prediction_offset)[masked]
            if top_p is not None and top_p < 1.0:
                ordered, places = torch.sort(logits, descending=True)
                mass = torch.cumsum(torch.softmax(ordered, dim=-1), dim=-1)
                drop = mass > top_p
                drop[..., 1:] = drop[..., :-1].clone()
                drop[..., 0] = False
                drop = torch.zeros_like(drop).scatter_(-1, places, drop)
                logits = logits.masked_fill(drop, torch.finfo(logits.dtype).min)
            if top_k is not None:
                kth = torch.topk(logits, min(top_k, logits.shape[-1]))[0][..., -1, None]
                logits = logits.masked_fill(logits < kth, torch.finfo(logits.dtype).min)
            probabilities = torch.softmax(logits, dim=-1)
            tokens = probabilities.argmax(dim=-1)
            confidence = (probabilities * torch.log(probabilities + 1e-10)).sum(dim=-1)
            left = int(masked.sum()) // len(canvas)  # all rows have the same number
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
