"""Preparation of rows for the devices: checks of requests, seeds, bucket lengths, and canvases."""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from runtime.decoding.block_schedule import canvas_length
from runtime.decoding.kinds import Choice, Integer, ParameterError
from runtime.decoding.parameters import MAX_STOP_TOKENS, DiffusionConfig, SamplingConfig, one_step_per_token
from runtime.decoding.schema import declared_parameters
from runtime.execution.left_padding import Rows, read_rows
from runtime.execution.row_request import RowRequest
from runtime.models.config import ModelConfig
from sharding.errors import InputError

ConfigT = TypeVar("ConfigT", DiffusionConfig, SamplingConfig, DiffusionConfig | SamplingConfig)

MAX_SAMPLES = 1 << 16
_SEED = Integer(0, (1 << 64) - 1)

# Canvas lengths are rounded up to multiples of at least this number. Above 256, rounding adds at most a quarter.
MIN_BUCKET = 64


def row_seed(seed: int, row: int | str, sample: int = 0) -> int:
    """Derive the seed of one row from the seed of its batch.

    It is the first 63 bits of the BLAKE2b digest of ``"seed:row:sample"``, with numbers in decimal. ``row`` is an index
    or a name. Generating the row alone with ``seed=[value]`` reproduces its tokens.
    """
    digest = hashlib.blake2b(f"{seed}:{row}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def row_seeds(seed: int | Sequence[int], rows: int, samples: int = 1) -> list[int]:
    """Return the seeds of ``rows * samples`` rows: for each row in turn, the seeds of its samples.

    From a single seed, all seeds are derived by :func:`row_seed`. With one seed per row, a row's first sample uses this
    seed, and the others ``row_seed(seed, 0, sample)``. With one seed per row and sample, the seeds are used unchanged.

    Raises:
      InputError: the number of seeds is none of these.
    """
    if isinstance(seed, numbers.Integral):
        return [row_seed(int(seed), row, sample) for row in range(rows) for sample in range(samples)]
    seeds = [int(one) for one in seed]  # type: ignore[union-attr]
    if len(seeds) == rows * samples:
        return seeds
    if len(seeds) != rows:
        raise InputError(f"{len(seeds)} seeds for {rows} rows; give one for the batch, or one per row", field="seed")
    return [one if sample == 0 else row_seed(one, 0, sample) for one in seeds for sample in range(samples)]


def seed_words(seeds: Sequence[int]) -> np.ndarray:
    """Convert seeds to PRNG key data, uint32 ``[B, 2]``, high word first."""
    return np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in map(int, seeds)], np.uint32).reshape(-1, 2)


def stop_rows(tokens: Sequence[int], batch: int) -> np.ndarray:
    """Pad stop tokens with -1 and repeat them for each row: int32 ``[batch, MAX_STOP_TOKENS]``."""
    return np.tile(np.array([*tokens, *[-1] * (MAX_STOP_TOKENS - len(tokens))], np.int32), (batch, 1))


def bucket_length(length: int, multiple: int = 1) -> int:
    """Round a length up to a bucket, which is a multiple of ``multiple``."""
    step = max(MIN_BUCKET, 1 << max(length.bit_length() - 3, 0))
    step = math.lcm(step, multiple)
    return math.ceil(length / step) * step


def default_config(model: ModelConfig) -> DiffusionConfig | SamplingConfig:
    """Return the default decoding parameters of a model.

    Families that do not have the default algorithm of :class:`DiffusionConfig` get the first that they have.
    """
    if model.objective == "autoregressive":
        return SamplingConfig()
    config, offered = DiffusionConfig(), model.family.algorithms
    return config if config.algorithm in offered else config.replace(algorithm=offered[0])


def config_kind(model: ModelConfig) -> type[DiffusionConfig | SamplingConfig]:
    """Return the configuration class of a model's decoding parameters."""
    return SamplingConfig if model.objective == "autoregressive" else DiffusionConfig


def with_model_blocks(config: ConfigT, model: ModelConfig) -> ConfigT:
    """Set what depends on the model alone: the block length of block-causal attention, and ``variable_length``.

    The block length is the configuration's own, or the model's if it has none.
    """
    if not isinstance(config, DiffusionConfig):
        return config
    own: dict[str, Any] = {"variable_length": model.family.variable_length, "attention_block_length": 0}
    if model.family.block_causal:
        length = config.block_length or model.attention_block_length
        own |= {"block_length": length, "attention_block_length": length}
    same = all(getattr(config, name) == value for name, value in own.items())
    return config if same else config.replace(**own)


def default_steps(model: ModelConfig, new_tokens: int, block_length: int | None = None) -> int:
    """Return the number of denoise steps that fill one position each.

    Steps are divided evenly among blocks. So that the last block, which may be in part beyond the new tokens, does not
    take steps from the others, schedules that count the steps of a block get those of whole blocks.

    Args:
      model: the model's configuration.
      new_tokens: number of new tokens.
      block_length: positions per block, if it is not the model's own.
    """
    block = block_length or model.attention_block_length
    whole = model.family.schedule == "even_block" or (model.family.schedule == "even" and new_tokens > block)
    return one_step_per_token(new_tokens, block if whole else 0)


def with_steps_for_masks(
    config: DiffusionConfig | SamplingConfig, model: ModelConfig, masks: int
) -> DiffusionConfig | SamplingConfig:
    """Return a configuration with a step for each new token, and for each of ``masks`` masks in the prompt.

    Without steps of their own, these would be filled many at a time: with ``max_new_tokens=0`` all in one pass.
    """
    if not masks or isinstance(config, SamplingConfig) or config.variable_length:
        return config
    return config.replace(steps=default_steps(model, config.max_new_tokens + masks, config.block_length))


def published_config(model: ModelConfig, checkpoint_name: str, **overrides: Any) -> DiffusionConfig | SamplingConfig:
    """Return a model's published settings for a checkpoint of this name, changed by ``overrides``.

    Raises:
      ParameterError: an override has a wrong value, or conflicts with another parameter.
    """
    found = with_model_blocks(config_kind(model).published_for(model.family, checkpoint_name, **overrides), model)
    if isinstance(found, SamplingConfig) or found.variable_length or "steps" in overrides:
        return found
    return found.replace(steps=default_steps(model, found.max_new_tokens, found.block_length))


def check_samples(samples: int) -> None:
    """Check a number of samples per row.

    Raises:
      InputError: it is not an integer, or out of range.
    """
    Integer(1, MAX_SAMPLES).read("num_return_sequences", samples)


def check_stop_tests(tests: Sequence[object], sequences: int) -> None:
    """Check that there is a stop test, or None, for every sequence, or no test at all.

    Raises:
      InputError: there are more or fewer.
    """
    if len(tests) not in (0, sequences):
        raise InputError(f"there are {len(tests)} stop_tests; expected one for each of the {sequences} sequences")


def prepare_rows(
    input_ids: Any,
    attention_mask: Any,
    config: DiffusionConfig | SamplingConfig,
    samples: int,
    model: ModelConfig,
    suffixes: Sequence[Sequence[int]] = (),
) -> tuple[Rows, list[int]]:
    """Check a caller's batch and its configuration, and repeat each row for its samples.

    Args:
      input_ids: integers ``[B, S]``.
      attention_mask: ``[B, S]``, 1 for tokens and 0 for padding on the left; None for no padding.
      config: decoding parameters.
      samples: number of samples per row.
      model: the model's configuration.
      suffixes: for each row, the tokens that follow its new tokens; empty if no row has any.

    Returns:
      ``B * samples`` rows, with the samples of a row adjacent, and their seeds.

    Raises:
      InputError: the rows or the configuration are invalid for this model.
    """
    check_samples(samples)
    rows = read_rows(input_ids, attention_mask, model, suffixes)
    check_request(rows, model, config)
    seeds = row_seeds(config.seed, len(rows.lengths), samples)
    return rows.take([row for row in range(len(rows.lengths)) for _ in range(samples)]), seeds


def check_kind(config: ModelConfig, request: DiffusionConfig | SamplingConfig) -> None:
    """Check that decoding parameters match the model's objective and family.

    Raises:
      InputError: the parameters are for the other objective, or one has a value that the family does not have.
    """
    wanted = config_kind(config)
    if not isinstance(request, wanted):
        way = "autoregressive" if wanted is SamplingConfig else "a diffusion model"
        raise InputError(
            f"this checkpoint ({config.family.name}) is {way}: pass a {wanted.__name__}, not a {type(request).__name__}"
        )
    # Where nothing sets the number of steps, it follows the number of new tokens.
    follows = {"steps": one_step_per_token(request.max_new_tokens)}
    # A parameter that needs settings of others explains them, and a choice the numbers that go with it, so it is named
    # before them.
    order = sorted(declared_parameters(wanted), key=lambda one: (-len(one.requires), not isinstance(one.kind, Choice)))
    for one in order:
        value, offered = getattr(request, one.name), one.values_of(config.family)
        if offered is None or value in offered or (one.name, value) in follows.items():
            continue
        said, hint = one.name, ""
        if isinstance(one.kind, Choice):
            said = f"{one.name}={value}"
            hint = f"; use {'one of ' if len(offered) > 1 else ''}{', '.join(offered)}"
        elif one.name in follows:
            hint = "; leave it out, or equal to max_new_tokens"
        raise InputError(f"{said} is not available for {config.family.name} models{hint}", field=one.name)


def check_request(rows: Rows, config: ModelConfig, request: DiffusionConfig | SamplingConfig) -> None:
    """Check that the rows fit the model and have something to generate.

    Raises:
      InputError: the parameters do not match the model, a row is longer than the model allows, the model cannot see a
        suffix, there are neither new tokens nor masks in a prompt, or a canvas of variable length starts with more
        masks than its limit allows.
    """
    check_kind(config, request)
    check_suffixes(rows.suffixes, config)
    row = int(rows.given.argmax())
    longest = canvas_length(int(rows.given[row]), request)
    if longest > config.max_positions:
        where = f"row {row}: " if len(rows.lengths) > 1 else ""
        suffix = len(rows.suffix(row))
        blocks = " in whole blocks" if isinstance(request, DiffusionConfig) and request.attention_block_length else ""
        parts = f"{rows.lengths[row]} prompt tokens" + (f", {suffix} suffix tokens" if suffix else "")
        raise InputError(
            f"{where}{parts} and {request.max_new_tokens} new tokens are {longest} positions{blocks}; the model "
            f"allows {config.max_positions}",
            field="max_new_tokens",
        )
    inside = np.arange(rows.tokens.shape[1]) < rows.lengths[:, None]
    if request.max_new_tokens == 0 and not ((rows.tokens == config.mask_token_id) & inside).any():
        raise ParameterError("max_new_tokens", "is 0 and no prompt contains the mask token: there is nothing to fill")
    if config.family.variable_length:
        _check_window(rows, config, request.max_new_tokens)


def check_row(
    tokens: Sequence[int], suffix: Sequence[int], config: ModelConfig, request: DiffusionConfig | SamplingConfig
) -> None:
    """Check one row, whose decoding parameters have passed :func:`check_kind`.

    Almost all rows need only a comparison of lengths: a batch may have millions of them.

    Raises:
      InputError: as in :func:`check_request`.
    """
    fits = request.max_new_tokens > 0 and canvas_length(len(tokens), request) <= config.max_positions
    if len(suffix) or config.family.variable_length or not fits:
        check_request(RowRequest(tokens, request, 0, suffix).rows, config, request)


def check_tokens(tokens: Sequence[int], seed: int, config: ModelConfig) -> None:
    """Check the tokens and the seed of a row that a caller made.

    Raises:
      InputError: there is no token, an id is not in the vocabulary, or the seed is not in its range.
    """
    if not len(tokens):
        raise InputError("the prompt has no token")
    check_ids(tokens, config)
    _SEED.read("seed", seed)


def check_ids(tokens: Sequence[Any], config: ModelConfig, field: str | None = None) -> None:
    """Check that the model knows all tokens of a row, which may be empty. A tokenizer can have more than the model.

    Raises:
      InputError: an id is no integer, or is outside the vocabulary; ``field`` is its field.
    """
    ids = np.asarray(tokens)
    if ids.size and ids.dtype.kind not in "iu":
        raise InputError(f"token ids are of type {ids.dtype}; expected integers", field=field)
    for token in (ids.min(), ids.max()) if ids.size else ():
        if not 0 <= token < config.vocab_size:
            raise InputError(f"token id {token} is outside the vocabulary of {config.vocab_size}", field=field)


def _check_window(rows: Rows, config: ModelConfig, limit: int) -> None:
    for row, length in enumerate(rows.lengths):
        tokens = rows.tokens[row, :length]
        masks = int((tokens == config.mask_token_id).sum())
        if masks > limit or (limit == 0 and masks == 0):
            raise InputError(
                f"row {row}: the prompt has {masks} masks; the limit of what fills them, the new tokens, is {limit}",
                field="max_new_tokens",
            )
        if masks == 0 and config.expand_token_id in tokens:
            raise InputError(f"row {row}: its prompt has the expand token ({config.expand_token_id}), but no mask")


def check_suffixes(suffixes: Sequence[Sequence[int]], config: ModelConfig) -> None:
    """Check that the model's new tokens see the suffix after them, and that no suffix contains a mask.

    Raises:
      InputError: attention is causal or block-causal, or a suffix has a mask token or an expand token.
    """
    if suffixes and config.family.attention != "bidirectional":
        attention = config.family.attention.replace("_", "-")
        raise InputError(
            f"suffix is not available for {config.family.name} models: their attention is {attention}, so new tokens "
            "do not see what follows them",
            field="suffix",
        )
    if any(config.mask_token_id in suffix for suffix in suffixes):
        raise InputError("the suffix contains the mask token; only a prompt may contain masks", field="suffix")
    if any(config.expand_token_id in suffix for suffix in suffixes):
        raise InputError("the suffix contains the expand token, which becomes two masks", field="suffix")


def make_canvas(rows: Rows, config: ModelConfig, new_tokens: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Create canvases of start-aligned rows: prompt, masks for a diffusion model's new tokens, suffix, then filler.

    Returns:
      Canvases int32 ``[B, width]``, and lengths int32 ``[B]`` of prompt and new tokens together.
    """
    canvas = np.full((len(rows.tokens), width), config.pad_token_id, np.int32)
    for row, length in enumerate(rows.lengths):
        canvas[row, :length] = rows.tokens[row, :length]
        if config.objective == "masked_diffusion":
            canvas[row, length : length + new_tokens] = config.mask_token_id
        suffix = rows.suffix(row)
        canvas[row, length + new_tokens : length + new_tokens + len(suffix)] = suffix
    return canvas, rows.lengths + np.int32(new_tokens)
