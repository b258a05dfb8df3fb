"""Conversion of a caller's left-padded batch to start-aligned rows, and back.

Inside the runtime, every row starts at position 0 and has a length. Left padding exists only in the arrays that
callers pass in and get back.

Dimension letters: B batch, S the caller's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.models.config import ModelConfig
from sharding.errors import InputError


def row_starts(mask: np.ndarray) -> np.ndarray:
    """Return where the rows of a left-padded batch begin, int64 ``[B]``, from its attention mask ``[B, S]``."""
    return _starts(mask.astype(bool).sum(axis=1), mask.shape[1])


def _starts(lengths: np.ndarray, width: int) -> np.ndarray:
    """Return where rows of these lengths ``[B]`` begin if they are left-padded to a width."""
    return width - lengths


def unpadded_rows(values: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    """Return the rows of a left-padded batch without their padding.

    Args:
      values: ``[B * R, W, ...]``, R rows for each row of ``mask``, one after another. W is at least S: new tokens may
        follow the prompts.
      mask: ``[B, S]``, attention mask of the prompts.
    """
    starts = np.repeat(row_starts(mask), len(values) // len(mask))
    return [row[start:] for row, start in zip(values, starts, strict=True)]


def left_padded(rows: Sequence[Sequence[int]], filler: int) -> tuple[np.ndarray, np.ndarray]:
    """Left-pad rows of tokens with ``filler``: int32 ``[B, S]`` and an attention mask ``[B, S]``."""
    width = max(map(len, rows))
    ids = np.full((len(rows), width), filler, np.int32)
    mask = np.zeros_like(ids)
    for row, start in enumerate(_starts(np.array([len(tokens) for tokens in rows]), width)):
        ids[row, start:], mask[row, start:] = rows[row], 1
    return ids, mask


@dataclass(frozen=True)
class Rows:
    """A batch of start-aligned rows.

    Attributes:
      tokens: int32 ``[B, longest]``, the tokens of each row, followed by filler.
      lengths: int32 ``[B]``, number of tokens of each row, at least 1.
      original: int32 ``[B, S]``, the left-padded rows as the caller gave them.
      suffixes: for each row, the tokens that follow its new tokens; empty if no row has any.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    original: np.ndarray
    suffixes: Sequence[Sequence[int]] = ()

    def take(self, rows: slice | list[int]) -> Rows:
        """Select some of the rows."""
        chosen = range(len(self.lengths))[rows] if isinstance(rows, slice) else rows
        suffixes = [self.suffixes[row] for row in chosen] if self.suffixes else ()
        return Rows(self.tokens[rows], self.lengths[rows], self.original[rows], suffixes)

    def suffix(self, row: int) -> Sequence[int]:
        """Return the tokens that follow the new tokens of a row."""
        return self.suffixes[row] if self.suffixes else ()

    @property
    def given(self) -> np.ndarray:
        """The number of tokens that are given for each row, prompt and suffix together: int64 ``[B]``."""
        return self.lengths + np.array([len(self.suffix(row)) for row in range(len(self.lengths))])

    @property
    def real(self) -> np.ndarray:
        """Mask of the caller's positions that are tokens rather than padding: bool ``[B, S]``."""
        width = self.original.shape[1]
        return np.arange(width) >= _starts(self.lengths, width)[:, None]

    def real_canvas(self, new: int) -> np.ndarray:
        """Return :attr:`real`, extended by ``new`` new tokens in each row: bool ``[B, S + new]``."""
        return np.pad(self.real, ((0, 0), (0, new)), constant_values=True)


def read_rows(
    input_ids: Any,
    attention_mask: Any,
    config: ModelConfig,
    suffixes: Sequence[Any] | None = None,
    name: str = "input_ids",
) -> Rows:
    """Check a batch and start-align its rows.

    Args:
      input_ids: integers ``[B, S]``.
      attention_mask: ``[B, S]``, 0 for padding on the left and 1 for tokens; None if there is no padding.
      config: the model's configuration, for the range of token ids.
      suffixes: for each row, the tokens that follow its new tokens; None or empty if no row has any.
      name: name of the ids in an error.

    Raises:
      InputError: the shape or dtype is wrong, an id is outside the vocabulary, padding is not on the left, a row has
        no tokens, or the number of suffixes differs from the number of rows.
    """
    try:
        ids = np.asarray(input_ids)
    except ValueError as error:
        raise InputError(f"{name}: rows of unequal length; pad them on the left and give an attention_mask") from error
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer) or 0 in ids.shape:
        raise InputError(f"{name}: expected integers [batch, sequence], got {ids.dtype} {list(ids.shape)}")
    try:
        mask = np.ones_like(ids) if attention_mask is None else np.asarray(attention_mask)
    except ValueError as error:
        raise InputError(f"attention_mask: rows of unequal length; it must have the shape of {name}") from error
    if mask.shape != ids.shape:
        raise InputError(f"attention_mask is {list(mask.shape)}, {name} {list(ids.shape)}; they must be the same")
    if not np.isin(mask, (0, 1)).all():
        raise InputError("attention_mask: expected 1 for real tokens and 0 for padding")
    mask = mask.astype(bool)
    lengths = mask.sum(axis=1)
    for row, start in enumerate(row_starts(mask)):
        if lengths[row] == 0:
            raise InputError(f"row {row}: the attention_mask has no 1; expected at least one token")
        if not mask[row, start:].all():
            where = "after its tokens (right padding)" if not mask[row, -1] else "between its tokens"
            raise InputError(f"row {row}: padding {where}; rows must be padded on the left")
        _check_ids(row, ids[row, start:], config)
    after = [_read_suffix(row, suffix, config) for row, suffix in enumerate(() if suffixes is None else suffixes)]
    if after and len(after) != len(ids):
        raise InputError(f"{len(after)} suffixes for {len(ids)} rows; give one for each row", field="suffix")
    tokens = np.zeros((len(ids), lengths.max()), np.int32)
    for row, start in enumerate(row_starts(mask)):
        tokens[row, : lengths[row]] = ids[row, start:]
    return Rows(tokens, lengths.astype(np.int32), ids.astype(np.int32), after if any(after) else ())


def _read_suffix(row: int, suffix: Any, config: ModelConfig) -> list[int]:
    tokens = np.asarray(suffix)
    if tokens.size and (tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer)):
        raise InputError(
            f"row {row}: the suffix must be a list of token ids, not {tokens.dtype} {list(tokens.shape)}",
            field="suffix",
        )
    _check_ids(row, tokens, config)
    found: list[int] = tokens.tolist()
    return found


def _check_ids(row: int, ids: np.ndarray, config: ModelConfig) -> None:
    outside = ids[(ids < 0) | (ids >= config.vocab_size)]
    if outside.size:
        raise InputError(f"row {row}: token id {outside[0]} is outside the vocabulary of {config.vocab_size}")


def end_align(values: np.ndarray, lengths: np.ndarray, onto: np.ndarray) -> np.ndarray:
    """Move start-aligned values to the end of rows, as in a left-padded batch.

    Args:
      values: ``[B, S, ...]``, start-aligned.
      lengths: ``[B]``, number of values of each row.
      onto: ``[B, W, ...]``, values for the positions before them, such as the caller's padding.

    Returns:
      ``[B, W, ...]``.
    """
    out = onto.copy()
    for row, start in enumerate(_starts(lengths, onto.shape[1])):
        out[row, start:] = values[row, : lengths[row]]
    return out


def start_align(values: np.ndarray, lengths: np.ndarray, onto: np.ndarray) -> np.ndarray:
    """Invert :func:`end_align`: write end-aligned values ``[B, W, ...]`` to the start of ``onto`` ``[B, S, ...]``."""
    out = onto.copy()
    for row, start in enumerate(_starts(lengths, values.shape[1])):
        out[row, : lengths[row]] = values[row, start:]
    return out
