"""Generating and scoring token ids with a model on a mesh: all that needs no tokenizer.

Dimension letters: B batch, S the caller's width, N new tokens, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from runtime.decoding.block_schedule import canvas_length
from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.execution.caller_rows import CallerRows
from runtime.execution.generation import Observers, WatchedBatch, generate_rows
from runtime.execution.hooks import LogitsHook, TokensHook
from runtime.execution.left_padding import read_rows
from runtime.execution.likelihood import Pair, estimate_log_likelihoods, log_likelihoods
from runtime.execution.offline import OfflineScheduler
from runtime.execution.requests import StopTest
from runtime.execution.result import GenerationResult
from runtime.execution.row_request import RowRequest
from runtime.execution.rows import check_request, default_config, prepare_rows, with_model_blocks
from runtime.execution.runner import Runner
from runtime.execution.scoring import logits_of_rows, score_batch
from sharding.errors import InputError

GenerationConfig = DiffusionConfig | SamplingConfig


class TokenEngine:
    """Token-level calls of a model on a mesh.

    Attributes:
      runner: weights and compiled programs.
      layout: how the model lies on the mesh.
      config: the model.
      dtype: dtype of the weights on the devices.
    """

    def __init__(self, runner: Runner) -> None:
        """Take a model that is ready to run."""
        self.runner = runner
        self.layout, self.config, self.dtype = runner.layout, runner.layout.config, runner.dtype

    @property
    def platform(self) -> str:
        """``cpu``, ``gpu`` or ``tpu``."""
        return self.runner.platform

    @property
    def compiled_programs(self) -> int:
        """Programs compiled so far."""
        return self.runner.programs.compiled

    def program_texts(self) -> dict[str, str]:
        """Optimized HLO of every program compiled so far, by name."""
        return self.runner.programs.texts()

    def batch_size(self, rows: int, length: int, cached: bool = False) -> int:
        """Of ``rows`` rows of ``length`` positions, how many are on the devices at a time, with a cache or without."""
        return self.runner.batch_size(rows, self.runner.bucket(length), cached)

    def known_end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text of the model, as far as its files say."""
        return self.config.end_token_ids

    def _resolved(self, config: GenerationConfig | None) -> GenerationConfig:
        """A configuration, the model's default for None, with what it leaves to the model."""
        return with_model_blocks(config or default_config(self.config), self.config)

    def _decided(self, config: GenerationConfig | None) -> GenerationConfig:
        """A configuration as token-level calls run it: rows end early only where it says so itself."""
        config = self._resolved(config)
        return config.with_end_tokens(self.known_end_tokens(), default=False) if config.early_stop else config

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
    ) -> GenerationResult:
        """Generate: by masked diffusion exactly as the original algorithm, or token after token, as the model is.

        Args:
          input_ids: integers ``[B, S]``; a diffusion model fills mask tokens in a prompt too.
          attention_mask: ``[B, S]``, 1 for tokens and 0 for padding on the left; None for no padding.
          config: decoding parameters; default ``DiffusionConfig()``, or ``SamplingConfig()``. Without ``early_stop``
            a row ends with its ``stop_token_ids`` alone.
          history: return the canvas after each step (diffusion).
          num_return_sequences: samples of each row, adjacent in the result.
          tokens_hook: called between steps, may change the canvas (diffusion).
          logits_hook: called in every step with ``[B, S + N, V]`` float32 logits, may change them (diffusion).
          watch: called with (steps done, canvas int32 ``[B, S + N]``) before the first step and after each.
          progress: called with (steps done, steps in all at most) along the way, all batches counted.
          stop_tests: for each sequence of the result a test that may end its row early, or None; a row ends a few steps
            after its test has said so. See :data:`runtime.execution.requests.StopTest`.

        Returns:
          Sequences ``[B * num_return_sequences, S + N]`` and what they cost.

        Raises:
          InputError: what is wrong with the rows or the request.
        """
        config = self._decided(config)
        observers = Observers(history, tokens_hook, logits_hook, watch, progress, stop_tests)
        observers.check(config)
        rows, seeds = prepare_rows(input_ids, attention_mask, config, num_return_sequences, self.config)
        return generate_rows(self.runner, rows, config, seeds, observers)

    def stream_tokens(
        self, input_ids: Any, attention_mask: Any = None, config: GenerationConfig | None = None, *, every: int = 1
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Generate with the program of :meth:`generate_tokens`, handing out the canvas along the way.

        Yields:
          (steps done, canvas int32 ``[B, S + N]``): first 0 and the canvas without new tokens, then after every
          ``every`` steps (tokens, for an autoregressive model); the last canvas is the result.

        Raises:
          InputError: as :meth:`generate_tokens`; or more rows than memory allows at a time.
        """
        config = self._decided(config)
        if every < 1:
            raise InputError(f"every is {every}; it must be at least 1")
        rows, seeds = prepare_rows(input_ids, attention_mask, config, 1, self.config)
        width = self.runner.bucket(canvas_length(int(rows.lengths.max()), config))
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
        """A scheduler over rows that are all known; each gets the tokens of :meth:`generate_tokens` for it alone.

        Args:
          requests: the rows.
          slots: rows on the devices at a time; default by memory and mesh.
          stop_tests: of each request; see :meth:`generate_tokens`.

        Raises:
          InputError: a row that cannot be generated.
        """
        # Requests by the million share a few configurations.
        configs: dict[int, GenerationConfig] = {}
        decided = []
        for number, request in enumerate(requests):
            is_new = id(request.config) not in configs
            try:
                if is_new or not 0 < request.config.max_new_tokens <= self.config.max_positions - len(request.tokens):
                    check_request(request.rows, self.config, request.config)
            except InputError as error:
                raise InputError(f"request {number}: {error}") from error
            if is_new:
                configs[id(request.config)] = self._decided(request.config)
            decided.append(RowRequest(request.tokens, configs[id(request.config)], request.seed))
        return OfflineScheduler(self.runner, decided, slots, stop_tests=stop_tests)

    # ---- scoring ----------------------------------------------------------------------------------------------

    def logits(self, input_ids: Any, attention_mask: Any = None, *, block_length: int | None = None) -> np.ndarray:
        """The model's output at every position, unshifted: numpy float32 ``[B, S, V]``, zero at padding.

        One forward pass; the logits are gathered to the host a chunk of positions at a time.

        Args:
          input_ids: integers ``[B, S]``.
          attention_mask: ``[B, S]``, left padding; None for none.
          block_length: positions of a block of block-causal attention; default the model's.

        Raises:
          InputError: rows that do not fit the model, or blocks of a model that has none.
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
        """Log-probabilities of given tokens, float32 ``[B, S]``; see :func:`runtime.execution.scoring.score_batch`."""
        options: dict[str, Any] = {"temperature": temperature, "width": width, "batch": batch}
        return score_batch(self.runner, input_ids, targets, attention_mask, **options)

    def log_likelihoods(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Log-likelihoods under an autoregressive model; see :mod:`runtime.execution.likelihood`."""
        return log_likelihoods(self.runner, pairs)

    def estimate_log_likelihoods(self, pairs: Sequence[Pair], *, samples: int = 128, seed: int = 0) -> list[float]:
        """Monte Carlo estimates under a diffusion model; see :mod:`runtime.execution.likelihood`."""
        return estimate_log_likelihoods(self.runner, pairs, samples=samples, seed=seed)
