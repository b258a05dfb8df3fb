"""From what a caller gives (left-padded rows) to what the devices run (start-aligned rows in buckets), and back."""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.decoding.parameters import MAX_STOP_TOKENS, DiffusionConfig, SamplingConfig
from runtime.models.config import ModelConfig
from sharding.errors import InputError

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


@dataclass(frozen=True)
class Rows:
    """Start-aligned rows.

    Attributes:
      tokens: int32 ``[B, longest]``, a row's tokens first.
      lengths: int32 ``[B]``, at least 1.
      original: int32 ``[B, S]``, the rows as the caller gave them, padding first.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    original: np.ndarray

    def take(self, rows: slice | list[int]) -> Rows:
        """Some of the rows."""
        return Rows(self.tokens[rows], self.lengths[rows], self.original[rows])

    @property
    def real(self) -> np.ndarray:
        """Which of the caller's positions are tokens: bool ``[B, S]``."""
        width = self.original.shape[1]
        return np.arange(width) >= width - self.lengths[:, None]


def read_rows(input_ids: Any, attention_mask: Any, config: ModelConfig) -> Rows:
    """Check a batch and start-align its rows.

    Args:
      input_ids: integers ``[B, S]``.
      attention_mask: ``[B, S]`` of 1 for real tokens after 0 for padding, or None.
      config: the model, for the range of token ids.

    Raises:
      InputError: wrong shape or dtype, an id outside the vocabulary, right padding, padding between tokens, or a row
        without tokens.
    """
    try:
        ids = np.asarray(input_ids)
    except ValueError as error:
        raise InputError(
            "input_ids: rows of unequal length; pad them on the left and give an attention_mask"
        ) from error
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer) or 0 in ids.shape:
        raise InputError(f"input_ids: expected integers [batch, sequence], got {ids.dtype} {list(ids.shape)}")
    try:
        mask = np.ones_like(ids) if attention_mask is None else np.asarray(attention_mask)
    except ValueError as error:
        raise InputError("attention_mask: rows of unequal length; it must have the shape of input_ids") from error
    if mask.shape != ids.shape:
        raise InputError(f"attention_mask is {list(mask.shape)}, input_ids {list(ids.shape)}; they must be the same")
    if not np.isin(mask, (0, 1)).all():
        raise InputError("attention_mask: expected 1 for real tokens and 0 for padding")
    mask = mask.astype(bool)
    lengths = mask.sum(axis=1)
    width = ids.shape[1]
    for row in range(len(ids)):
        if lengths[row] == 0:
            raise InputError(f"row {row}: the attention_mask leaves no token")
        if not mask[row, width - lengths[row] :].all():
            where = "after its tokens (right padding)" if not mask[row, -1] else "between its tokens"
            raise InputError(f"row {row}: padding {where}; rows must be padded on the left")
        real = ids[row, width - lengths[row] :]
        outside = real[(real < 0) | (real >= config.vocab_size)]
        if outside.size:
            raise InputError(f"row {row}: token id {outside[0]} is outside the vocabulary of {config.vocab_size}")
    tokens = np.zeros((len(ids), lengths.max()), np.int32)
    for row, length in enumerate(lengths):
        tokens[row, :length] = ids[row, width - length :]
    return Rows(tokens, lengths.astype(np.int32), ids.astype(np.int32))


def check_kind(config: ModelConfig, request: DiffusionConfig | SamplingConfig) -> None:
    """Check that a request is for the model's way of decoding.

    Raises:
      InputError: it is for the other.
    """
    wanted = SamplingConfig if config.objective == "autoregressive" else DiffusionConfig
    if not isinstance(request, wanted):
        way = "autoregressive" if config.objective == "autoregressive" else "a diffusion model"
        raise InputError(
            f"this checkpoint ({config.family.name}) is {way}: give a {wanted.__name__}, not a {type(request).__name__}"
        )


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


def end_align(values: np.ndarray, lengths: np.ndarray, onto: np.ndarray) -> np.ndarray:
    """Put start-aligned rows back to the end of the caller's rows.

    Args:
      values: ``[B, S, ...]``.
      lengths: ``[B]``, how many of S count.
      onto: ``[B, W, ...]``, what stands where no value does: the caller's own padding.

    Returns:
      ``[B, W, ...]``.
    """
    out = onto.copy()
    for row, length in enumerate(lengths):
        out[row, onto.shape[1] - length :] = values[row, :length]
    return out


def start_align(values: np.ndarray, lengths: np.ndarray, onto: np.ndarray) -> np.ndarray:
    """The inverse of :func:`end_align`: values ``[B, W, ...]`` to the start of ``onto`` ``[B, S, ...]``."""
    out = onto.copy()
    for row, length in enumerate(lengths):
        out[row, :length] = values[row, values.shape[1] - length :]
    return out
