"""Logits and log-probabilities of given tokens, computed by a single forward pass.

Dimension letters: B batch, S the caller's width, V vocab.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from runtime.decoding.kinds import Integer, Real
from runtime.decoding.parameters import MAX_TEMPERATURE, MIN_TEMPERATURE
from runtime.execution.left_padding import Rows, end_align, read_rows
from runtime.execution.programs import lower_hidden, lower_logits, lower_score, put, shapes_of
from runtime.execution.runner import Runner
from runtime.models.forward import Forward
from runtime.models.masks import MAX_BLOCK_LENGTH
from sharding.errors import InputError, NonFiniteError
from sharding.settings import own_settings


def pad_rows(rows: Rows, batch: int, bucket: int) -> tuple[np.ndarray, np.ndarray]:
    """Pad start-aligned rows to a bucket and a batch size: int32 tokens ``[batch, bucket]``, lengths ``[batch]``."""
    count, width = rows.tokens.shape
    canvas = np.pad(rows.tokens, ((0, batch - count), (0, bucket - width)))
    return canvas, np.pad(rows.lengths, (0, batch - count), constant_values=1)


def check_length(runner: Runner, rows: Rows) -> None:
    """Check that rows are not longer than the model allows.

    Raises:
      InputError: a row is too long.
    """
    width, limit = rows.tokens.shape[1], runner.layout.config.max_positions
    if width > limit:
        raise InputError(f"a row has {width} positions; the model allows {limit}")


@own_settings()
def gather_logits(runner: Runner, canvas: np.ndarray, lengths: np.ndarray, block_length: int = 0) -> np.ndarray:
    """Compute the logits float32 ``[B, S, V]`` of padded rows (see :func:`pad_rows`), and copy them to the host.

    Logits are not shifted: those at position i are the model's output there, even if it predicts the token at i + 1.
    The output head runs on one chunk of positions at a time, so no device holds the logits of a whole canvas.
    """
    layout, forward = runner.layout, runner.forward(canvas.shape[1], block_length)
    arguments = (runner.weights, put(canvas, layout.sharding("batch", None)), put(lengths, layout.sharding("batch")))
    transformer = runner.programs.get(
        ("hidden", forward, shapes_of(arguments)), lambda: lower_hidden(forward, *arguments)
    )
    hidden = transformer(*arguments)
    chunk = math.gcd(canvas.shape[1], runner.chunk(len(canvas), canvas.shape[1]))
    logits = np.empty((*canvas.shape, layout.config.vocab_size), np.float32)
    for start in range(0, canvas.shape[1], chunk):
        piece = jax.device_put(hidden[:, start : start + chunk], layout.sharding("batch", "canvas", "embed"))
        head = runner.programs.get(
            ("logits", forward, shapes_of(piece)), partial(lower_logits, forward, runner.weights, piece)
        )
        logits[:, start : start + chunk] = np.asarray(head(runner.weights, piece))[..., : layout.config.vocab_size]
    return logits


def shifted_logits(runner: Runner, canvas: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Compute the logits that predict each position, float32 ``[B, S, V]``.

    They are the model's outputs, shifted by the ``prediction_offset`` of its family. The first ``prediction_offset``
    positions keep their own output.
    """
    logits = gather_logits(runner, canvas, lengths)
    offset = runner.layout.config.family.prediction_offset
    return np.concatenate([logits[:, :offset], logits[:, : logits.shape[1] - offset]], axis=1)


def logits_of_rows(runner: Runner, rows: Rows, block_length: int | None = None) -> np.ndarray:
    """Compute logits float32 ``[B, S, V]`` in the caller's layout, not shifted, and zero at padding.

    Args:
      runner: the model on its mesh.
      rows: the rows, start-aligned and as the caller gave them.
      block_length: block length of block-causal attention; None for the model's own.

    Raises:
      InputError: the rows do not fit the model, or ``block_length`` is given for a model without blocks.
    """
    check_length(runner, rows)
    model = runner.layout.config
    if block_length is not None:
        if not model.family.block_causal:
            raise InputError(f"block_length is not available for {model.family.name} models", field="block_length")
        Integer(1, MAX_BLOCK_LENGTH).read("block_length", block_length)
    out = np.zeros((*rows.original.shape, runner.layout.config.vocab_size), np.float32)
    bucket = runner.bucket(rows.tokens.shape[1])
    size = runner.batch_size(len(rows.lengths), bucket)
    for part in runner.batches(len(rows.lengths), bucket):
        own = rows.take(part)
        out[part] = end_align(
            gather_logits(runner, *pad_rows(own, size, bucket), block_length or 0), own.lengths, out[part]
        )
    return out


def score_rows(
    runner: Runner, rows: Rows, targets: Rows, temperature: float, width: int | None = None, batch: int | None = None
) -> np.ndarray:
    """Compute log-probabilities float32 ``[B, S]`` of ``targets``, zero at padding.

    Each target is scored with the output that predicts its position. Nothing predicts the first token of an
    autoregressive row: its score is 0. Log-probabilities are not finite where the model's
    logits are not; :func:`check_scores` makes this an error.

    Args:
      runner: the model on its mesh.
      rows: the tokens that the model reads.
      targets: the tokens to score, of the same shape.
      temperature: divides the logits.
      width: the bucket to pad to; by default that of the longest row.
      batch: number of rows to run at a time, a multiple of the data axis; by default, it depends on the number of rows
        and on memory.

    Raises:
      InputError: a row is longer than the model or ``width`` allows, or ``width`` or ``batch`` do not divide over the
        mesh.
    """
    check_length(runner, rows)
    layout = runner.layout
    sizes: tuple[tuple[str, Any, str], ...] = (("width", width, "sequence"), ("batch", batch, "data"))
    for name, value, axis in sizes:
        unit = getattr(layout.spec, axis)
        if value is not None and (not isinstance(value, numbers.Integral) or value < 1 or value % unit):
            raise InputError(f"{name}={value}: expected a positive multiple of the {axis} axis ({unit})", field=name)
    longest = rows.tokens.shape[1]
    bucket = width or runner.bucket(longest)
    if longest > bucket:
        raise InputError(f"the longest row has {longest} positions; width={bucket} allows {bucket}")
    size = batch or runner.batch_size(len(rows.lengths), bucket)
    forward, chunk = _scoring(runner, size, bucket)
    out = np.zeros(rows.original.shape, np.float32)
    for first in range(0, len(rows.lengths), size):
        part = slice(first, min(first + size, len(rows.lengths)))
        own = rows.take(part)
        canvas, lengths = pad_rows(own, size, bucket)
        goal, _ = pad_rows(targets.take(part), size, bucket)
        place = layout.sharding("batch", None)
        arguments = (
            runner.weights,
            put(canvas, place),
            put(goal, place),
            put(lengths, layout.sharding("batch")),
            put(np.float32(temperature), layout.replicated),
        )
        compiled = runner.programs.get(
            ("score", forward, chunk, shapes_of(arguments)), partial(lower_score, forward, chunk, *arguments)
        )
        out[part] = end_align(np.asarray(compiled(*arguments)), own.lengths, out[part])
    return out


def check_scores(scores: np.ndarray, numbers: Sequence[int] | None = None) -> None:
    """Check log-probabilities ``[B, S]`` from :func:`score_rows`.

    Args:
      scores: the log-probabilities.
      numbers: the number of each row in an error; None for its index.

    Raises:
      NonFiniteError: the model's logits are not finite; the error names the rows.
    """
    wrong = ~np.isfinite(scores).all(axis=1)
    if wrong.any():
        rows = np.flatnonzero(wrong).tolist()
        raise NonFiniteError(rows if numbers is None else sorted({numbers[row] for row in rows}))


def _scoring(runner: Runner, rows: int, width: int) -> tuple[Forward, int]:
    """Return the forward context and the number of positions per head chunk for scoring rows of this width."""
    return runner.forward(width), math.gcd(width, runner.chunk(rows, width))


def compile_scoring(runner: Runner, rows: int, width: int) -> None:
    """Compile the program that scores ``rows`` rows of this width. May be called from any thread."""
    forward, chunk = _scoring(runner, rows, width)
    layout = runner.layout
    tokens = jax.ShapeDtypeStruct((rows, width), np.int32, sharding=layout.sharding("batch", None))
    lengths = jax.ShapeDtypeStruct((rows,), np.int32, sharding=layout.sharding("batch"))
    temperature = jax.ShapeDtypeStruct((), np.float32, sharding=layout.replicated)
    arguments: tuple[Any, ...] = (runner.weights, tokens, tokens, lengths, temperature)
    key = ("score", forward, chunk, shapes_of(arguments))
    runner.programs.prepare(key, partial(lower_score, forward, chunk, *arguments))


def score_batch(
    runner: Runner,
    input_ids: Any,
    targets: Any,
    attention_mask: Any = None,
    *,
    temperature: float = 1.0,
    width: int | None = None,
    batch: int | None = None,
) -> np.ndarray:
    """Compute the log-probability of a given token at each position.

    For an estimator of a diffusion model's likelihood, the caller masks ``input_ids`` (for coupled-GRPO, three copies
    of each completion: all masked, a random mask, its complement) and combines the results. Without ``attention_mask``,
    all positions are attended to, as in DiffuCoder's own scoring pass, which does this even for padded rows.

    Args:
      runner: the model on its mesh.
      input_ids: integers ``[B, S]``, the tokens that the model reads.
      targets: integers ``[B, S]``, the token to score at each position.
      attention_mask: ``[B, S]``, 0 for padding on the left and 1 for tokens; None if there is no padding.
      temperature: divides the logits.
      width, batch: fix the padded length and the number of rows per pass, so that one program serves every call; see
        :func:`score_rows`.

    Returns:
      numpy float32 ``[B, S]``, zero at padding.

    Raises:
      InputError: a shape, dtype, token id or the temperature is invalid.
      NonFiniteError: the model's logits are not finite.
    """
    rows = read_rows(input_ids, attention_mask, runner.layout.config)
    if targets is None:
        raise InputError("token ids need targets: the token to score at each position, integers [batch, sequence]")
    wanted = read_rows(targets, attention_mask, runner.layout.config, name="targets")
    if wanted.original.shape != rows.original.shape:
        raise InputError(
            f"targets are {list(wanted.original.shape)}, input_ids {list(rows.original.shape)}; they must be the same"
        )
    temperature = Real(MIN_TEMPERATURE, MAX_TEMPERATURE).read("temperature", temperature)
    scores = score_rows(runner, rows, wanted, temperature, width, batch)
    check_scores(scores)
    return scores
