"""Log-likelihood of continuations: exact for autoregressive models, a Monte Carlo bound for diffusion.

Dimension letters: R rows of one call, S the longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.decoding.parameters import SamplingConfig
from runtime.execution.left_padding import read_rows
from runtime.execution.offline import OfflineScheduler
from runtime.execution.row_request import RowRequest
from runtime.execution.runner import Runner
from runtime.execution.scoring import score_rows
from sharding.errors import InputError

# The share of a continuation that is masked at least, as Dream's authors have it.
_LEAST_MASKED = 1e-3
_ROWS = 64

Pair = tuple[Sequence[int], Sequence[int]]


def _check(pairs: Sequence[Pair], limit: int) -> None:
    for number, (context, continuation) in enumerate(pairs):
        if not context or not continuation:
            raise InputError(f"pair {number}: context and continuation have at least one token each")
        if len(context) + len(continuation) > limit:
            raise InputError(
                f"pair {number}: {len(context)} and {len(continuation)} tokens; the model allows {limit} in all"
            )


def _padded(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Left-padded rows int32 ``[R, S]`` and their attention mask."""
    width = max(map(len, rows))
    ids, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), np.int32)
    for row, tokens in enumerate(rows):
        ids[row, width - len(tokens) :] = tokens
        mask[row, width - len(tokens) :] = 1
    return ids, mask


def log_likelihoods(runner: Runner, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
    """Of each continuation after its context, under an autoregressive model.

    Args:
      runner: with an autoregressive model.
      pairs: tokens of contexts and continuations.

    Returns:
      The sum of the continuation's log-probabilities, and whether greedy decoding gives that continuation.

    Raises:
      InputError: a pair that is empty or too long, or a diffusion model.
    """
    if runner.layout.config.objective == "masked_diffusion":
        raise InputError(
            "log_likelihoods is exact, of autoregressive models; estimate_log_likelihoods is for diffusion"
        )
    _check(pairs, runner.layout.config.max_positions)
    sums = [0.0] * len(pairs)
    order = sorted(range(len(pairs)), key=lambda number: len(pairs[number][0]) + len(pairs[number][1]))
    for start in range(0, len(order), _ROWS):
        part = order[start : start + _ROWS]
        ids, mask = _padded([[*pairs[number][0], *pairs[number][1]] for number in part])
        scored = read_rows(ids, mask, runner.layout.config)
        found = score_rows(runner, scored, scored, 1.0)
        for row, number in enumerate(part):
            sums[number] = float(found[row, -len(pairs[number][1]) :].astype(np.float64).sum())
    requests = [RowRequest(list(context), SamplingConfig(max_new_tokens=len(new)), 0) for context, new in pairs]
    greedy = [False] * len(pairs)
    for results in OfflineScheduler(runner, requests).run():
        for result in results:
            context, new = pairs[result.number]
            greedy[result.number] = result.sequence[len(context) :].tolist() == list(new)
    return list(zip(sums, greedy, strict=True))


def estimate_log_likelihoods(
    runner: Runner, pairs: Sequence[Pair], *, samples: int = 128, seed: int = 0
) -> list[float]:
    """Monte Carlo estimate of a lower bound of each continuation's log-likelihood, under a diffusion model.

    As in the evaluation of Dream's authors (after SMDM, Nie et al., 2024): a share t of the continuation's tokens is
    masked, t uniform and stratified over the samples, and the log-probabilities of the masked ones are summed and
    divided by t. The last token, the end of the text, is never masked. An estimate depends on its pair and the seed
    alone.

    Args:
      runner: with a diffusion model.
      pairs: tokens of contexts and of continuations with their end token.
      samples: noised copies of each pair.
      seed: of the noise.

    Raises:
      InputError: a pair that is empty or too long, or a model that is autoregressive or block-causal.
    """
    if runner.layout.config.objective == "autoregressive":
        raise InputError("estimates are of diffusion models; log_likelihoods is exact for autoregressive ones")
    if runner.layout.config.family.attention == "block_causal":
        raise InputError("estimates are not for block-causal models: they mask all blocks of a text at once")
    _check(pairs, runner.layout.config.max_positions)
    found = []
    for context, continuation in pairs:
        generator = np.random.default_rng([seed, len(context), *context, *continuation])
        whole = np.array([*context, *continuation], np.int32)
        times = (generator.random() + np.arange(samples) / samples) % 1
        share = ((1 - _LEAST_MASKED) * times + _LEAST_MASKED)[:, None]
        masked = generator.random((samples, len(whole))) < share
        masked[:, : len(context)] = masked[:, -1] = False
        rows = np.where(masked, runner.layout.config.mask_token_id, whole)
        noised, targets = (
            read_rows(ids, None, runner.layout.config) for ids in (rows, np.broadcast_to(whole, rows.shape))
        )
        scores = score_rows(runner, noised, targets, 1.0).astype(np.float64)
        found.append(float((np.where(masked, scores, 0.0) / share).sum() / samples))
    return found
