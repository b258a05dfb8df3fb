"""Log-likelihoods of continuations: exact for autoregressive models, a Monte Carlo estimate for diffusion models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.decoding.kinds import Integer
from runtime.decoding.parameters import SamplingConfig
from runtime.execution.left_padding import left_padded, read_rows
from runtime.execution.offline import OfflineScheduler
from runtime.execution.row_request import RowRequest
from runtime.execution.rows import MAX_SAMPLES, check_tokens
from runtime.execution.runner import Runner
from runtime.execution.scoring import check_scores, score_rows
from runtime.models.config import ModelConfig
from sharding.errors import InputError

# Minimum fraction of a continuation that is masked, as in the evaluation code of Dream's authors.
_LEAST_MASKED = 1e-3
_ROWS = 64

Pair = tuple[Sequence[int], Sequence[int]]


def _check(pairs: Sequence[Pair], config: ModelConfig, least: int = 1) -> None:
    limit = config.max_positions
    for number, (context, continuation) in enumerate(pairs):
        if not len(context) or not len(continuation):
            raise InputError(f"pair {number}: context and continuation must have at least one token each")
        if len(continuation) < least:
            raise InputError(
                f"pair {number}: the continuation has one token; expected at least {least}, because the last one, the "
                "end token, is never masked"
            )
        try:
            check_tokens((*context, *continuation), 0, config)
        except InputError as error:
            raise InputError(f"pair {number}: {error}") from error
        if len(context) + len(continuation) > limit:
            raise InputError(
                f"pair {number}: {len(context)} context tokens and {len(continuation)} continuation tokens; the model "
                f"allows {limit} in total"
            )


def log_likelihoods(runner: Runner, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
    """Compute the log-likelihood of each continuation after its context, with an autoregressive model.

    Args:
      runner: the model on its mesh.
      pairs: tokens of contexts and continuations.

    Returns:
      For each pair, the sum of the continuation's log-probabilities, and whether greedy decoding of the context
      produces exactly this continuation.

    Raises:
      InputError: a context or continuation is empty, too long or has a token that the model does not have, or the model
        is a diffusion model.
      NonFiniteError: the model's logits are not finite.
    """
    if runner.layout.config.objective == "masked_diffusion":
        raise InputError(
            "log_likelihoods requires an autoregressive model; use estimate_log_likelihoods for a diffusion model"
        )
    _check(pairs, runner.layout.config)
    sums = [0.0] * len(pairs)
    order = sorted(range(len(pairs)), key=lambda number: len(pairs[number][0]) + len(pairs[number][1]))
    for start in range(0, len(order), _ROWS):
        part = order[start : start + _ROWS]
        ids, mask = left_padded([[*pairs[number][0], *pairs[number][1]] for number in part], 0)
        scored = read_rows(ids, mask, runner.layout.config)
        found = score_rows(runner, scored, scored, 1.0)
        check_scores(found, part)
        for row, number in enumerate(part):
            sums[number] = float(found[row, -len(pairs[number][1]) :].astype(np.float64).sum())
    requests = [RowRequest(list(context), SamplingConfig(max_new_tokens=len(new)), 0) for context, new in pairs]
    greedy = [False] * len(pairs)
    for results in OfflineScheduler(runner, requests).run():
        for result in results:
            result.check()
            context, new = pairs[result.number]
            greedy[result.number] = result.sequence[len(context) :].tolist() == list(new)
    return list(zip(sums, greedy, strict=True))


def estimate_log_likelihoods(
    runner: Runner, pairs: Sequence[Pair], *, samples: int = 128, seed: int = 0
) -> list[float]:
    """Estimate a lower bound of each continuation's log-likelihood by Monte Carlo, with a diffusion model.

    This follows the evaluation of Dream's authors (after SMDM, Nie et al., 2024). In each sample, a fraction t of the
    continuation's tokens is masked, and the log-probabilities of the masked tokens are summed and divided by t. t is
    uniform, and stratified over the samples. The last token, which ends the text, is never masked. An estimate depends
    only on its pair and on the seed.

    Args:
      runner: the model on its mesh.
      pairs: tokens of contexts and of continuations; a continuation includes its end token.
      samples: number of noised copies per pair.
      seed: seed of the noise.

    Raises:
      InputError: a context or continuation is empty, too long or has a token that the model does not have; ``samples``
        or ``seed`` is out of range; or the model is autoregressive or block-causal, or its canvas changes its length.
      NonFiniteError: the model's logits are not finite.
    """
    if runner.layout.config.objective == "autoregressive":
        raise InputError(
            "estimate_log_likelihoods requires a diffusion model; use log_likelihoods for an autoregressive model"
        )
    if runner.layout.config.family.block_causal:
        raise InputError(
            "estimate_log_likelihoods does not support block-causal models: it masks all blocks of a text at once"
        )
    if runner.layout.config.family.variable_length:
        raise InputError(
            "estimate_log_likelihoods does not support models whose canvas changes its length: a text of n tokens may "
            "come from any number of masks"
        )
    _check(pairs, runner.layout.config, least=2)
    samples = Integer(1, MAX_SAMPLES).read("samples", samples)
    seed = Integer(0, (1 << 64) - 1).read("seed", seed)
    found = []
    for number, (context, continuation) in enumerate(pairs):
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
        check_scores(scores, [number] * samples)
        found.append(float((np.where(masked, scores, 0.0) / share).sum() / samples))
    return found
