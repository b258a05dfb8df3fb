"""Start-aligned rows as the devices run them: seeds, buckets, canvases, and checks of requests."""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from runtime.decoding.parameters import MAX_STOP_TOKENS, DiffusionConfig, SamplingConfig
from runtime.execution.left_padding import Rows, read_rows
from runtime.models.config import ModelConfig
from sharding.errors import InputError

ConfigT = TypeVar("ConfigT", DiffusionConfig, SamplingConfig, DiffusionConfig | SamplingConfig)

MAX_SAMPLES = 1 << 16

# Canvas lengths are rounded up to buckets: at least this many positions, and at most a quarter more than asked for.
MIN_BUCKET = 64


def row_seed(seed: int, row: int | str, sample: int = 0) -> int:
    """Seed of one row when a batch is given a single seed.

    The first 63 bits of the BLAKE2b digest of ``"seed:row:sample"``, numbers in decimal; a row may have a name.
    The row generated alone with this value in ``DiffusionConfig.seed=[value]`` gives the same tokens again.
    """
    digest = hashlib.blake2b(f"{seed}:{row}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def row_seeds(seed: int | Sequence[int], rows: int, samples: int = 1) -> list[int]:
    """Seeds of ``rows * samples`` rows, sample by sample within each row.

    A single seed is derived by :func:`row_seed`. With one seed per row, the first sample of a row has that very seed
    and the others ``row_seed(seed, 0, sample)``; with one per row and sample, they are used as they are.

    Raises:
      InputError: a number of seeds that is neither.
    """
    if isinstance(seed, numbers.Integral):
        return [row_seed(int(seed), row, sample) for row in range(rows) for sample in range(samples)]
    seeds = [int(one) for one in seed]  # type: ignore[union-attr]
    if len(seeds) == rows * samples:
        return seeds
    if len(seeds) != rows:
        raise InputError(f"{len(seeds)} seeds for {rows} rows; give one for the batch, or one per row")
    return [one if sample == 0 else row_seed(one, 0, sample) for one in seeds for sample in range(samples)]


def seed_words(seeds: Sequence[int]) -> np.ndarray:
    """Key data of seeds: uint32 ``[B, 2]``, high word first."""
    return np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32).reshape(-1, 2)


def stop_rows(tokens: Sequence[int], batch: int) -> np.ndarray:
    """Stop tokens as the devices have them: int32 ``[batch, MAX_STOP_TOKENS]``, -1 for none."""
    return np.tile(np.array([*tokens, *[-1] * (MAX_STOP_TOKENS - len(tokens))], np.int32), (batch, 1))


def sampling_scalars(config: DiffusionConfig | SamplingConfig, vocab_size: int) -> dict[str, np.generic]:
    """The numbers of a request that sampling reads, as the devices have them."""
    return {
        "temperature": np.float32(config.temperature),
        "top_p": np.float32(1.0 if config.top_p is None else config.top_p),
        "top_k": np.int32(vocab_size if config.top_k is None else config.top_k),
    }


def sampling_rows(config: DiffusionConfig | SamplingConfig, vocab_size: int, batch: int) -> dict[str, np.ndarray]:
    """The same numbers, one for each of ``batch`` rows."""
    return {name: np.full(batch, value) for name, value in sampling_scalars(config, vocab_size).items()}


def bucket_length(length: int, multiple: int = 1) -> int:
    """Canvas length that ``length`` positions are run at: few lengths, each a multiple of ``multiple``."""
    step = max(MIN_BUCKET, 1 << max(length.bit_length() - 3, 0))
    step = math.lcm(step, multiple)
    return math.ceil(length / step) * step


def default_config(model: ModelConfig) -> DiffusionConfig | SamplingConfig:
    """The decoding parameters of a request that names none."""
    return config_kind(model)()


def config_kind(model: ModelConfig) -> type[DiffusionConfig | SamplingConfig]:
    """The kind of decoding parameters that a model takes."""
    return SamplingConfig if model.objective == "autoregressive" else DiffusionConfig


def with_model_blocks(config: ConfigT, model: ModelConfig) -> ConfigT:
    """Set the block length of block-causal attention: the configuration's own, or the model's if it has none."""
    if not isinstance(config, DiffusionConfig) or model.family.attention != "block_causal":
        return config
    length = config.block_length or model.attention_block_length
    return config.replace(block_length=length, attention_block_length=length)


def prepare_rows(
    input_ids: Any,
    attention_mask: Any,
    config: DiffusionConfig | SamplingConfig,
    samples: int,
    model: ModelConfig,
) -> tuple[Rows, list[int]]:
    """Check a caller's batch and request, and repeat each row for its samples.

    Args:
      input_ids: integers ``[B, S]``.
      attention_mask: ``[B, S]``, 1 for tokens and 0 for padding on the left; None for no padding.
      config: decoding parameters.
      samples: of each row.
      model: what they are for.

    Returns:
      ``B * samples`` rows, samples of a row adjacent, and their seeds.

    Raises:
      InputError: what is wrong with the rows or the request.
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or not 1 <= samples <= MAX_SAMPLES:
        raise InputError(f"num_return_sequences is {samples!r}; expected an integer from 1 to {MAX_SAMPLES}")
    rows = read_rows(input_ids, attention_mask, model)
    check_request(rows, model, config)
    seeds = row_seeds(config.seed, len(rows.lengths), samples)
    return rows.take([row for row in range(len(rows.lengths)) for _ in range(samples)]), seeds


def check_kind(config: ModelConfig, request: DiffusionConfig | SamplingConfig) -> None:
    """Check that a request is for the model's way of decoding.

    Raises:
      InputError: it is for the other, or asks for an algorithm or for guidance that the family does not have.
    """
    wanted = config_kind(config)
    if not isinstance(request, wanted):
        way = "autoregressive" if wanted is SamplingConfig else "a diffusion model"
        raise InputError(
            f"this checkpoint ({config.family.name}) is {way}: give a {wanted.__name__}, not a {type(request).__name__}"
        )
    if not isinstance(request, DiffusionConfig):
        return
    check_blocks(config, request)
    if request.parallel not in config.family.parallel_rules:
        raise InputError(
            f"parallel={request.parallel} is not for {config.family.name} models; use one of "
            f"{', '.join(config.family.parallel_rules)}",
            field="parallel",
        )
    if request.cfg_scale > 0 and not config.family.guidance:
        raise InputError(f"cfg_scale is not for {config.family.name} models", field="cfg_scale")
    if request.algorithm not in config.family.algorithms:
        raise InputError(
            f"algorithm={request.algorithm} is not for {config.family.name} models; use one of "
            f"{', '.join(config.family.algorithms)}",
            field="algorithm",
        )


def check_blocks(config: ModelConfig, request: DiffusionConfig) -> None:
    """Check that the model's attention supports the requested cache and sub-blocks.

    Raises:
      InputError: it does not.
    """
    in_blocks, name = config.family.attention == "block_causal", config.family.name
    if in_blocks and request.cache not in ("none", "exact"):
        raise InputError(f"cache={request.cache} is not for {name} models; use none or exact", field="cache")
    if not in_blocks and request.cache == "exact":
        raise InputError(f"cache=exact is not for {name} models: it is for block-causal attention", field="cache")
    if not in_blocks and request.sub_block_length is not None:
        raise InputError(f"sub_block_length is not for {name} models", field="sub_block_length")
    if request.sub_block_cache and request.sub_block_length is None:
        raise InputError("sub_block_cache requires sub_block_length", field="sub_block_cache")


def check_request(rows: Rows, config: ModelConfig, request: DiffusionConfig | SamplingConfig) -> None:
    """Check that every row has something to generate and fits the model.

    Raises:
      InputError: a request for the other way of decoding, a row longer than the model's positions, or no new tokens and
        no masks in a prompt.
    """
    check_kind(config, request)
    longest = int(rows.lengths.max()) + request.max_new_tokens
    if longest > config.max_positions:
        row = int(rows.lengths.argmax())
        where = f"row {row}: " if len(rows.lengths) > 1 else ""
        raise InputError(
            f"{where}{rows.lengths[row]} prompt tokens and {request.max_new_tokens} new ones make {longest}; "
            f"the model allows {config.max_positions} in all"
        )
    inside = np.arange(rows.tokens.shape[1]) < rows.lengths[:, None]
    if request.max_new_tokens == 0 and not ((rows.tokens == config.mask_token_id) & inside).any():
        raise InputError(
            "max_new_tokens is 0 and no prompt contains the mask token: there is nothing to fill",
            field="max_new_tokens",
        )


def make_canvas(rows: Rows, config: ModelConfig, new_tokens: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Canvases for start-aligned rows: prompt, then masks (none for an autoregressive model), then filler.

    Returns:
      int32 ``[B, width]`` and lengths int32 ``[B]`` with the new tokens counted.
    """
    canvas = np.full((len(rows.tokens), width), config.pad_token_id, np.int32)
    for row, length in enumerate(rows.lengths):
        canvas[row, :length] = rows.tokens[row, :length]
        if config.objective == "masked_diffusion":
            canvas[row, length : length + new_tokens] = config.mask_token_id
    return canvas, rows.lengths + np.int32(new_tokens)
