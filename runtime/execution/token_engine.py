"""Token-level generation and scoring with a model on a mesh, without a tokenizer.

Dimension letters: B batch, S the caller's width, N new tokens, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import CheckpointFolder, load_weights, open_folder
from checkpoints.loading import LoadedBytes, Progress, check_weights
from runtime.decoding.block_schedule import canvas_length
from runtime.decoding.kinds import Integer
from runtime.decoding.parameters import MAX_NEW_TOKENS, DiffusionConfig, SamplingConfig
from runtime.execution.caller_rows import CallerRows
from runtime.execution.generation import Observers, WatchedBatch, generate_rows
from runtime.execution.hooks import LogitsHook, TokensHook
from runtime.execution.left_padding import read_rows
from runtime.execution.likelihood import Pair, estimate_log_likelihoods, log_likelihoods
from runtime.execution.offline import OfflineScheduler
from runtime.execution.options import check_options
from runtime.execution.requests import StopTest
from runtime.execution.result import GenerationResult
from runtime.execution.row_request import RowRequest
from runtime.execution.rows import (
    check_kind,
    check_row,
    check_stop_tests,
    check_tokens,
    default_config,
    prepare_rows,
    with_model_blocks,
)
from runtime.execution.runner import Runner
from runtime.execution.scoring import logits_of_rows, score_batch
from runtime.models.families import Weights, parse_config
from runtime.models.placement import place_weights
from sharding.errors import InputError

GenerationConfig = DiffusionConfig | SamplingConfig
_SLOTS = Integer(1, 1 << 30)


class TokenEngine:
    """A model on a mesh, with calls that take and return tokens.

    Attributes:
      runner: the weights and the compiled programs.
      layout: the layout of the model on the mesh.
      config: the model's configuration.
      dtype: dtype of the weights on the devices.
      loaded: how many bytes this host loaded from the checkpoint; None if the weights are not from a checkpoint.
    """

    def __init__(self, runner: Runner) -> None:
        """Create an engine from a runner."""
        self.runner = runner
        self.loaded: LoadedBytes | None = None
        self.layout, self.config, self.dtype = runner.layout, runner.layout.config, runner.dtype

    @property
    def platform(self) -> str:
        """Platform of the devices: ``cpu``, ``gpu`` or ``tpu``."""
        return self.runner.platform

    @property
    def compiled_programs(self) -> int:
        """Number of programs compiled so far, or read from JAX's persistent compilation cache."""
        return self.runner.programs.compiled

    def program_texts(self) -> dict[str, str]:
        """Return the optimized HLO of every program compiled so far, by name."""
        return self.runner.programs.texts()

    def batch_size(self, rows: int, length: int, cached: bool = False) -> int:
        """Return how many of ``rows`` rows of ``length`` positions are on the devices at a time."""
        return self.runner.batch_size(rows, self.runner.bucket(length), cached)

    def known_end_tokens(self) -> tuple[int, ...]:
        """Return the tokens that end a text, according to the model's files."""
        return self.config.end_token_ids

    def _resolved(self, config: GenerationConfig | None) -> GenerationConfig:
        """Fill in the model-dependent defaults of a configuration. None is the model's default configuration."""
        if not isinstance(config, DiffusionConfig | SamplingConfig | None):
            raise InputError(f"config: expected a DiffusionConfig or a SamplingConfig, not {config!r:.100}")
        return with_model_blocks(config or default_config(self.config), self.config)

    def _with_early_stop(self, config: GenerationConfig | None) -> GenerationConfig:
        """Complete a configuration for token-level calls, in which rows stop early only if it sets ``early_stop``."""
        config = self._resolved(config)
        return config.with_end_tokens(self.known_end_tokens(), default=False) if config.early_stop else config

    @property
    def weights(self) -> Weights:
        """The model's weights: a pytree of arrays, sharded over the mesh."""
        return self.runner.weights

    def replace_weights(
        self, source: Any, *, verify: str = "full", offline: bool = False, progress: Progress | None = None
    ) -> None:
        """Replace the weights on the same mesh. During the call, device memory holds both old and new weights.

        Args:
          source: a checkpoint of the same model, as for :meth:`load`, or a pytree of arrays like :attr:`weights`. Its
            arrays may be on any device or on the host, in any floating-point dtype; they are moved, cast and quantized.
            Arrays of JAX that need none of this are shared: do not donate or delete them while the engine has them.
          verify, offline, progress: see :meth:`load`.

        Raises:
          InputError, CheckpointError: the source does not match this model. The old weights stay in use.
        """
        if not isinstance(source, (str, Path, CheckpointFolder)):
            self.runner.weights, self.loaded = place_weights(self.layout, source, self.dtype), None
            return
        check_options(verify=verify)
        folder = open_folder(source, offline=offline)
        if found := self.config.differences(parse_config(folder.config)):
            raise InputError(f"{folder.name}: the model differs from this engine's ({'; '.join(found)})")
        check_weights(folder, self.layout, verify)
        self.runner.weights, self.loaded = load_weights(folder, self.layout, self.dtype, progress, verify)

    # ---- generation -------------------------------------------------------------------------------------------

    def generate_tokens(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        config: GenerationConfig | None = None,
        *,
        history: bool = False,
        num_return_sequences: int = 1,
        tokens_hook: TokensHook | None = None,
        logits_hook: LogitsHook | None = None,
        watch: Callable[[int, np.ndarray], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
        stop_tests: Sequence[StopTest | None] = (),
        suffixes: Sequence[Sequence[int]] = (),
    ) -> GenerationResult:
        """Generate tokens for a batch of prompts, by masked diffusion or autoregressively, depending on the model.

        Args:
          input_ids: integers ``[B, S]``. A diffusion model also fills mask tokens in a prompt.
          attention_mask: ``[B, S]``, 1 for tokens and 0 for padding on the left; None for no padding.
          config: decoding parameters; by default ``SamplingConfig()``, or ``DiffusionConfig()`` (exact decoding), with
            the first algorithm of families without ``origin``. Unless ``early_stop`` is set, only ``stop_token_ids``
            stop a row.
          history: return the canvas after each step (diffusion).
          num_return_sequences: number of samples per prompt, adjacent in the result.
          tokens_hook: ``hook(step, canvas, logits)``, called before the first step with step None and after each step;
            returns another canvas int32 ``[B, S + N]``, or None for no change (exact diffusion). ``logits`` is None
            without a ``logits_hook``.
          logits_hook: ``hook(step, canvas, logits)``, called in every step with float32 logits ``[B, S + N, V]``;
            returns other logits, or None for no change (exact diffusion).
          watch: called with the number of steps done and the canvas int32 ``[B, S + N]``, before the first step and
            after each step.
          progress: called during the run with the number of steps done and the maximum number of steps.
          stop_tests: for each sequence of the result, a function that may stop its row, or None. It is called with the
            row's final new tokens so far and with whether these are all of them. It returns how many of the tokens
            count, or None to continue. A row stops a few steps after its test has fired.
          suffixes: for each prompt, the tokens that follow its new tokens; empty for none. The model sees them, and the
            result does not contain them (diffusion with bidirectional attention).

        Returns:
          Sequences ``[B * num_return_sequences, S + N]`` and statistics.

        Raises:
          InputError: the rows or the configuration are invalid for this model, or there is not one stop test per
            sequence.
          NonFiniteError: the model's logits are not finite.
        """
        config = self._with_early_stop(config)
        rows, seeds = prepare_rows(input_ids, attention_mask, config, num_return_sequences, self.config, suffixes)
        observers = Observers(history, tokens_hook, logits_hook, watch, progress, stop_tests)
        observers.check(config)
        check_stop_tests(stop_tests, len(seeds))
        return generate_rows(self.runner, rows, config, seeds, observers)

    def stream_tokens(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        config: GenerationConfig | None = None,
        *,
        every: int = 1,
        suffixes: Sequence[Sequence[int]] = (),
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Generate like :meth:`generate_tokens`, and yield the canvas during the run.

        Yields:
          The number of steps done and the canvas int32 ``[B, S + N]``: first before any step, then after every
          ``every`` steps (tokens, for an autoregressive model). The last canvas is the result.

        Raises:
          InputError: as for :meth:`generate_tokens`, or there are more rows than fit into memory.
        """
        config = self._with_early_stop(config)
        every = Integer(1, MAX_NEW_TOKENS).read("every", every)
        rows, seeds = prepare_rows(input_ids, attention_mask, config, 1, self.config, suffixes)
        width = self.runner.bucket(canvas_length(int(rows.given.max()), config))
        batch = WatchedBatch(self.runner, CallerRows(rows, config, seeds, self.config, width), config, width)
        yield 0, batch.canvas()
        for done in batch.advance_by(every):
            yield done, batch.canvas()

    def scheduler(
        self,
        requests: Sequence[RowRequest],
        slots: int | None = None,
        stop_tests: Sequence[StopTest | None] = (),
    ) -> OfflineScheduler:
        """Create a scheduler for rows that are all known in advance.

        Each row yields the same tokens as in a call of :meth:`generate_tokens` with this row only.

        Args:
          requests: the rows.
          slots: number of rows on the devices at a time; the default depends on mesh and memory.
          stop_tests: one per request; see :meth:`generate_tokens`.

        Raises:
          InputError: a request is invalid for this model, or there is not one stop test per request.
        """
        check_stop_tests(stop_tests, len(requests))
        if slots is not None:
            _SLOTS.read("slots", slots)
        # There may be millions of requests, but they share few configuration objects, so each is checked once.
        configs: dict[int, GenerationConfig] = {}
        decided = []
        for number, request in enumerate(requests):
            is_new = id(request.config) not in configs
            try:
                if is_new:
                    check_kind(self.config, request.config)
                    own = self._with_early_stop(request.config)
                    configs[id(request.config)] = request.config if own == request.config else own
                own = configs[id(request.config)]
                check_tokens((*request.tokens, *request.suffix), request.seed, self.config)
                check_row(request.tokens, request.suffix, self.config, own)
            except InputError as error:
                raise InputError(f"request {number}: {error}", field=error.field) from error
            is_decided = own is request.config
            decided.append(request if is_decided else RowRequest(request.tokens, own, request.seed, request.suffix))
        return OfflineScheduler(self.runner, decided, slots, stop_tests=stop_tests)

    # ---- scoring ----------------------------------------------------------------------------------------------

    def logits(self, input_ids: Any, attention_mask: Any = None, *, block_length: int | None = None) -> np.ndarray:
        """Compute the model's output at every position, without a shift: numpy float32 ``[B, S, V]``, zero at padding.

        This takes one forward pass; the logits are brought to the host in chunks of positions.

        Args:
          input_ids: integers ``[B, S]``.
          attention_mask: ``[B, S]``, 1 for tokens and 0 for padding on the left; None for no padding.
          block_length: block length of block-causal attention; None for the model's own.

        Raises:
          InputError: the rows do not fit the model, or ``block_length`` is given for a model without blocks.
        """
        return logits_of_rows(self.runner, read_rows(input_ids, attention_mask, self.config), block_length)

    def score(
        self,
        input_ids: Any,
        targets: Any,
        attention_mask: Any = None,
        *,
        temperature: float = 1.0,
        width: int | None = None,
        batch: int | None = None,
    ) -> np.ndarray:
        """Compute log-probabilities, float32 ``[B, S]``; see :func:`runtime.execution.scoring.score_batch`."""
        options: dict[str, Any] = {"temperature": temperature, "width": width, "batch": batch}
        return score_batch(self.runner, input_ids, targets, attention_mask, **options)

    def log_likelihoods(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Compute the log-likelihood of each continuation after its context, with an autoregressive model.

        Args:
          pairs: for each text, the tokens of the context and those of its continuation.

        Returns:
          For each pair, the sum of the continuation's log-probabilities, and whether greedy decoding of the context
          produces exactly this continuation.

        Raises:
          InputError: a context or continuation is empty or too long, or the model is a diffusion model.
          NonFiniteError: the model's logits are not finite.
        """
        return log_likelihoods(self.runner, pairs)

    def estimate_log_likelihoods(self, pairs: Sequence[Pair], *, samples: int = 128, seed: int = 0) -> list[float]:
        """Estimate a lower bound of each continuation's log-likelihood by Monte Carlo, with a diffusion model.

        This follows the evaluation of Dream's authors. An estimate depends only on its pair and on the seed.

        Args:
          pairs: for each text, the tokens of the context and those of its continuation, end token included.
          samples: number of noised copies per pair.
          seed: seed of the noise.

        Raises:
          InputError: a context or continuation is empty or too long, or the model is autoregressive or block-causal, or
            its canvas changes its length.
          NonFiniteError: the model's logits are not finite.
        """
        return estimate_log_likelihoods(self.runner, pairs, samples=samples, seed=seed)
