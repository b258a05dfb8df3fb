"""The engine: weights on a mesh, compiled programs, and the calls that use them.

Dimension letters: B batch, S the caller's width, N new tokens, V vocab.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints import CheckpointError, CheckpointFolder, load_weights, open_folder
from checkpoints.loading import LoadedBytes, Progress, check_weights
from checkpoints.opening import VERIFY
from runtime.decoding.parameters import MAX_TEMPERATURE, MIN_TEMPERATURE, DiffusionConfig, SamplingConfig
from runtime.execution.generation import GenerationBatch, HookedBatch, LogitsHook, TokensHook
from runtime.execution.likelihood import Pair, estimate_log_likelihoods, log_likelihoods
from runtime.execution.offline import OfflineScheduler
from runtime.execution.result import GenerationResult, GenerationStats, committed_tokens, join_histories, masks_left
from runtime.execution.row_request import RowRequest
from runtime.execution.rows import Rows, check_request, read_rows, row_seeds
from runtime.execution.runner import Runner, check_attention, check_memory
from runtime.execution.scoring import logits_of_rows, score_rows
from runtime.models.attention import IMPLEMENTATIONS
from runtime.models.config import STORED_DTYPES, ModelConfig, token_ids
from runtime.models.declarations import ModelLayout, named_shapes
from runtime.models.families import Weights, model_layout, parse_config, weights_class
from runtime.models.kv_cache import CACHE_DTYPES
from runtime.models.placement import place_weights
from runtime.models.quantization import QUANTIZATIONS
from runtime.planner.default import default_mesh
from runtime.text.completions import Completion, certain_prefixes, cut_completions, stream_text
from runtime.text.tokenizer import TextTokenizer, encode_prompts
from sharding.errors import InputError
from sharding.mesh import MeshSpec
from sharding.validate import check_mesh

GenerationConfig = DiffusionConfig | SamplingConfig

logger = logging.getLogger("diffumesh")

# How often a generation says how far it is.
_PROGRESS_REPORTS = 64


def end_tokens(config: ModelConfig, folder: CheckpointFolder, tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Tokens that end a completion: the configurations' and the tokenizer's.

    Raises:
      ConfigError: the generation config names one that is no token.
    """
    ids = [*config.end_token_ids, *token_ids(folder.generation_config, "eos_token_id", config.vocab_size - 1)]
    return tuple(dict.fromkeys([*ids, *tokenizer.end_token_ids]))


def _cached(config: GenerationConfig) -> bool:
    return config.use_cache if isinstance(config, SamplingConfig) else config.cache != "none"


class Engine:
    """A model on a mesh.

    Attributes:
      config: the model.
      layout: how it lies on the mesh.
      dtype: dtype of the weights on the devices.
      notes: what was decided for the caller (mesh, dtype, attention), a sentence each.
      loaded: what this host has read of the checkpoint, None where there was none.
    """

    def __init__(
        self,
        layout: ModelLayout,
        weights: Weights,
        *,
        attention: str = "auto",
        folder: CheckpointFolder | None = None,
        max_batch: int | None = None,
        kv_cache: str = "model",
    ) -> None:
        """Take weights that are already on a mesh.

        Args:
          layout: the model on its mesh.
          weights: as :meth:`ModelLayout.abstract_weights` describes them.
          attention: ``auto``, ``xla``, ``cudnn`` or ``splash``.
          folder: where the tokenizer is; without one only token-level calls work.
          max_batch: rows on the devices at a time; default is what memory allows.
          kv_cache: dtype of keys and values that are kept: ``model``, ``bfloat16``, ``float32`` or ``int8``.
        """
        self.runner = Runner(layout, weights, attention, max_batch, kv_cache)
        self.layout = layout
        self.config: ModelConfig = layout.config
        self.dtype = self.runner.dtype
        self.notes: list[str] = []
        self.loaded: LoadedBytes | None = None
        self._folder = folder
        self._tokenizer: TextTokenizer | None = None

    @classmethod
    def load(
        cls,
        path: str | Path | CheckpointFolder,
        mesh: str | MeshSpec | None = None,
        dtype: str | None = None,
        *,
        attention: str = "auto",
        devices: Sequence[Any] | None = None,
        max_batch: int | None = None,
        quantize: str = "none",
        kv_cache: str = "model",
        rows: int = 1,
        revision: str | None = None,
        token: str | None = None,
        offline: bool = False,
        verify: str = "full",
        progress: Progress | None = None,
    ) -> Engine:
        """Load a checkpoint, Hugging Face or canonical, onto a mesh.

        Args:
          path: a folder, a URL that fsspec reads, or a Hub name; see :func:`checkpoints.open_folder`.
          mesh: ``"data=2,tensor=4"``, one axis may be -1; default is chosen from the model and the devices.
          dtype: ``bfloat16``, ``float32`` or ``float16``; default is the stored one, and float32 on CPU.
          attention: ``auto``, ``xla``, ``cudnn`` or ``splash``.
          devices: devices to use; default all.
          max_batch: rows on the devices at a time; default is what memory allows.
          quantize: ``int8`` keeps matrices as integers with a scale for each output channel; what is stored so is
            loaded so.
          kv_cache: dtype of keys and values that are kept: ``model``, ``bfloat16``, ``float32`` or ``int8``.
          rows: rows that batches will have, as a hint for the default mesh.
          revision: Hub revision.
          token: Hub token.
          offline: never ask the network.
          verify: ``full`` checks the digest of everything that is read, ``sizes`` shapes and dtypes, ``none`` nothing;
            a Hugging Face folder without a manifest has no digests.
          progress: called with (bytes read, bytes to read).

        Raises:
          CheckpointError, ConfigError, MeshError, InputError: what is wrong, before any weight is read.
        """
        if dtype is not None and dtype not in STORED_DTYPES:
            raise InputError(f"dtype {dtype!r} is not one of {', '.join(STORED_DTYPES)}")
        if attention not in IMPLEMENTATIONS:
            raise InputError(f"attention {attention!r} is not one of {', '.join(IMPLEMENTATIONS)}")
        if kv_cache not in CACHE_DTYPES:
            raise InputError(f"kv_cache {kv_cache!r} is not one of {', '.join(CACHE_DTYPES)}")
        if quantize not in QUANTIZATIONS:
            raise InputError(f"quantize {quantize!r} is not one of {', '.join(QUANTIZATIONS)}")
        if verify not in VERIFY:
            raise InputError(f"verify {verify!r} is not one of {', '.join(VERIFY)}")
        spec = MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh
        folder = open_folder(path, revision=revision, token=token, offline=offline)
        config = parse_config(folder.config)
        # Files and divisibility first: a wrong one stops here, before a device is touched.
        stored = check_weights(folder, model_layout(config)) or config.dtype
        if folder.quantization != "none":
            quantize = folder.quantization
        if spec is not None and spec.tensor != -1:
            check_mesh(named_shapes(config, weights_class(config)), spec, config.num_heads, config.num_kv_heads)
        found = list(jax.devices() if devices is None else devices)
        platform = found[0].platform
        notes = []
        if dtype is None:
            dtype = "float32" if platform == "cpu" else stored
            if dtype != stored:
                notes.append(f"weights stored as {stored}, run as float32 on CPU; --dtype={stored} keeps them")
        if spec is None:
            spec = default_mesh(config, found, dtype, rows, quantize)
            notes.append(f"mesh {spec}, chosen for {len(found)} {platform} device(s); --mesh overrides")
        layout = model_layout(config, spec.resolve(len(found)), found, quantize)
        check_memory(layout, dtype, found[0])
        check_attention(layout, attention, platform, dtype)
        weights, loaded = load_weights(folder, layout, dtype, progress, verify)
        engine = cls(layout, weights, attention=attention, folder=folder, max_batch=max_batch, kv_cache=kv_cache)
        engine.notes = notes
        engine.loaded = loaded
        for note in notes:
            logger.info(note)
        return engine

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        mesh: str | MeshSpec | None = None,
        dtype: str = "float32",
        *,
        seed: int = 0,
        attention: str = "auto",
        devices: Sequence[Any] | None = None,
        max_batch: int | None = None,
        quantize: str = "none",
        kv_cache: str = "model",
    ) -> Engine:
        """An engine with random weights, the same on every mesh, for benchmarks and tests.

        Raises:
          InputError: more weights than the devices hold.
        """
        found = list(jax.devices() if devices is None else devices)
        spec = MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh
        if spec is None:
            spec = default_mesh(config, found, dtype, 1, quantize)
        layout = model_layout(config, spec.resolve(len(found)), found, quantize)
        check_memory(layout, dtype, found[0])
        return cls(
            layout, layout.random_weights(seed, dtype), attention=attention, max_batch=max_batch, kv_cache=kv_cache
        )

    @property
    def weights(self) -> Weights:
        """The weights on the mesh."""
        return self.runner.weights

    def replace_weights(
        self, source: Any, *, verify: str = "full", offline: bool = False, progress: Progress | None = None
    ) -> None:
        """Swap the weights on the same mesh; programs, tokenizer and everything else stay.

        Until all of the new ones are there the old ones are kept, so the devices hold both for that long; arrays that
        lie where they are to be are taken as they are.

        Args:
          source: a checkpoint of the same model, as for :meth:`load`; or a tree of arrays with the shapes of
            :attr:`weights`, anywhere and of any floating-point dtype, which is cast, quantized and copied to where
            these lie unless it lies there already. Meshes that pad the model alike have the same shapes.
          verify: see :meth:`load`.
          offline: never ask the network.
          progress: called with (bytes read, bytes to read).

        Raises:
          InputError, CheckpointError: not weights of this model; the old ones stay.
        """
        if isinstance(source, (str, Path, CheckpointFolder)):
            if verify not in VERIFY:
                raise InputError(f"verify {verify!r} is not one of {', '.join(VERIFY)}")
            folder = open_folder(source, offline=offline)
            if found := self.config.differences(parse_config(folder.config)):
                raise InputError(f"{folder.name}: another model than this engine's ({'; '.join(found)})")
            check_weights(folder, self.layout)
            self.runner.weights, self.loaded = load_weights(folder, self.layout, self.dtype, progress, verify)
            return
        self.runner.weights = place_weights(self.layout, source, self.dtype)

    @property
    def platform(self) -> str:
        """``cpu``, ``gpu`` or ``tpu``."""
        return self.runner.platform

    def program_texts(self) -> dict[str, str]:
        """Optimized HLO of every program compiled so far, by name."""
        return self.runner.programs.texts()

    @property
    def compiled_programs(self) -> int:
        """Programs compiled so far."""
        return self.runner.programs.compiled

    def batch_size(self, rows: int, length: int, cached: bool = False) -> int:
        """Of ``rows`` rows of ``length`` positions, how many are on the devices at a time, with a cache or without."""
        return self.runner.batch_size(rows, self.runner.bucket(length), cached)

    def watch_programs(self, before_run: Callable[[jax.stages.Lowered | None], None]) -> None:
        """Call ``before_run`` before each run of a program, with its lowering where it is about to be compiled."""
        self.runner.programs.before_run = before_run

    @property
    def tokenizer(self) -> TextTokenizer:
        """The checkpoint's tokenizer.

        Raises:
          CheckpointError: the checkpoint has none.
        """
        if self._tokenizer is None and self._folder is not None:
            self._tokenizer = TextTokenizer.from_folder(self._folder)
        if self._tokenizer is None:
            raise CheckpointError(
                "this checkpoint has no tokenizer (tokenizer.json, or vocab.json and merges.txt); "
                "it serves the token-level calls only"
            )
        return self._tokenizer

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion: the configurations' and the tokenizer's."""
        tokenizer = self.tokenizer
        assert self._folder is not None, "a tokenizer comes from a folder"
        return end_tokens(self.config, self._folder, tokenizer)

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
        progress: Progress | None = None,
    ) -> GenerationResult:
        """Generate: by masked diffusion exactly as the original algorithm, or token after token, as the model is.

        Args:
          input_ids: integers ``[B, S]``; a diffusion model fills mask tokens in a prompt too.
          attention_mask: ``[B, S]``, 1 for tokens and 0 for padding on the left; None for no padding.
          config: what to do; default ``DiffusionConfig()``, or ``SamplingConfig()`` for an autoregressive model.
          history: hand back the canvas after each step (diffusion).
          num_return_sequences: samples of each row, next to one another in the result.
          tokens_hook: called between steps, may change the canvas (diffusion).
          logits_hook: called in every step with full logits, may change them; gathers ``[B, S + N, V]`` float32
            (diffusion).
          watch: called with (steps done, canvas int32 ``[B, S + N]``) before the first step and after each.
          progress: called with (steps done, steps in all at most) along the way, all batches counted.

        Returns:
          Sequences ``[B * num_return_sequences, S + N]`` and what they cost.

        Raises:
          InputError: what is wrong with the rows or the request.
        """
        start = time.perf_counter()
        compiled, compile_seconds = self.runner.programs.compiled, self.runner.programs.seconds
        config = config or self._default_config()
        hooked = tokens_hook is not None or logits_hook is not None
        if self.config.objective == "autoregressive" and (hooked or history):
            raise InputError("hooks and history are of denoise steps; this checkpoint is autoregressive")
        if isinstance(config, DiffusionConfig) and config.in_blocks and hooked:
            raise InputError("hooks are of the original algorithm: leave cache, blocks, parallel and stop tokens off")
        rows, seeds = self._prepare(input_ids, attention_mask, config, num_return_sequences)
        stats = GenerationStats()
        pieces, steps = [], 0
        for run, batches in self._runs(
            rows, config, seeds, num_return_sequences, whole=hooked or watch is not None, hooked=hooked
        ):
            stats.steps = max(stats.steps, run.steps)
            before, total = steps, steps + (batches - stats.batches) * run.steps
            steps += run.steps
            hooked_result = None
            if isinstance(run, HookedBatch):
                hooked_result = run.run(tokens_hook, logits_hook, history)
            elif watch is None and progress is None:
                run.advance()
            else:
                if progress is not None:
                    progress(before, total)
                if watch is not None:
                    watch(0, run.canvas())
                for done in run.advance_by(1 if watch is not None else max(1, run.steps // _PROGRESS_REPORTS)):
                    if progress is not None:
                        progress(before + done, total)
                    if watch is not None:
                        watch(done, run.canvas())
            piece = hooked_result or run.result(history)
            pieces.append(piece)
            stats.forwards += piece.forwards
            stats.positions += piece.positions
            stats.batches += 1
        sequences = np.concatenate([piece.sequences for piece in pieces])
        commit_steps = np.concatenate([piece.commit_steps for piece in pieces])
        histories = [piece.history for piece in pieces if piece.history is not None]
        unfolded = join_histories(histories) if histories else None
        kept = [piece.log_probabilities for piece in pieces if piece.log_probabilities is not None]
        log_probabilities = np.concatenate(kept) if kept else None
        real = np.pad(rows.real, ((0, 0), (0, config.max_new_tokens)), constant_values=True)
        stats.tokens = committed_tokens(commit_steps)
        stats.masks_left = int(masks_left(sequences, real, self.config.mask_token_id).sum())
        stats.compiled_programs = self.runner.programs.compiled - compiled
        stats.compile_seconds = self.runner.programs.seconds - compile_seconds
        stats.seconds = time.perf_counter() - start
        return GenerationResult(sequences, commit_steps, unfolded, seeds, log_probabilities, stats)

    def stream_tokens(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        config: GenerationConfig | None = None,
        *,
        every: int = 1,
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Generate with the same program as :meth:`generate_tokens`, handing out the canvas along the way.

        Yields:
          (steps done, canvas int32 ``[B, S + N]``): first 0 and the canvas without new tokens, then after every
          ``every`` steps (tokens, for an autoregressive model); the last canvas is the result.

        Raises:
          InputError: as :meth:`generate_tokens`; or more rows than memory allows at a time.
        """
        config = config or self._default_config()
        if every < 1:
            raise InputError(f"every is {every}; it must be at least 1")
        rows, seeds = self._prepare(input_ids, attention_mask, config, 1)
        for run, _ in self._runs(rows, config, seeds, 1, whole=True):
            yield 0, run.canvas()
            for done in run.advance_by(every):
                yield done, run.canvas()

    def scheduler(self, requests: Sequence[RowRequest], slots: int | None = None) -> OfflineScheduler:
        """Many rows through a fixed number of slots: each has the tokens that :meth:`generate_tokens` gives it alone.

        Args:
          requests: rows, each with its own configuration and seed.
          slots: rows on the devices at a time, see :class:`runtime.execution.offline.OfflineScheduler`.

        Raises:
          InputError: a row that cannot be generated.
        """
        return OfflineScheduler(self.runner, requests, slots)

    def generate(
        self,
        prompts: Sequence[str],
        config: GenerationConfig | None = None,
        *,
        chat: bool = False,
        num_return_sequences: int = 1,
        stop: Sequence[str] = (),
    ) -> list[Completion]:
        """Complete texts.

        Args:
          prompts: texts; mask tokens written in them (``<|mask|>``) are filled too.
          config: what to do; default as in :meth:`generate_tokens`. An autoregressive row ends with the checkpoint's
            end tokens too.
          chat: each prompt is a user's message in the checkpoint's chat template.
          num_return_sequences: completions of each prompt.
          stop: strings that end a completion.

        Returns:
          Completions, prompt by prompt.

        Raises:
          InputError: an empty prompt, or as :meth:`generate_tokens`.
          CheckpointError: no tokenizer, or no chat template.
        """
        ids, mask = self.encode(prompts, chat=chat)
        config = self.with_end_tokens(config)
        result = self.generate_tokens(ids, mask, config, num_return_sequences=num_return_sequences)
        return self.completions(prompts, ids, mask, result, stop=stop, stop_token_ids=config.stop_token_ids)

    def stream(
        self,
        prompt: str,
        config: GenerationConfig | None = None,
        *,
        chat: bool = False,
        stop: Sequence[str] = (),
        every: int = 1,
    ) -> Iterator[str]:
        """Complete one text, handing it out as it becomes certain.

        Args:
          prompt: as for :meth:`generate`.
          config: as for :meth:`generate`. A diffusion model hands out what stands before its first mask, so blocks
            (``block_length``) make it flow.
          chat: as for :meth:`generate`.
          stop: as for :meth:`generate`.
          every: steps or tokens between two looks.

        Yields:
          Pieces that together are the text of :meth:`generate`.

        Raises:
          InputError, CheckpointError: as :meth:`generate`.
        """
        ids, mask = self.encode([prompt], chat=chat)
        config = self.with_end_tokens(config)
        canvases = self.stream_tokens(ids, mask, config, every=every)
        masked = None if self.config.objective == "autoregressive" else self.config.mask_token_id
        prefixes = certain_prefixes(canvases, ids.shape[1], masked)
        ends = (*self.end_token_ids, *config.stop_token_ids)
        yield from stream_text(self.tokenizer, prefixes, ends, stop)

    def with_end_tokens(self, config: GenerationConfig | None) -> GenerationConfig:
        """A configuration whose rows end with the checkpoint's end tokens too, where rows end at all."""
        config = config or self._default_config()
        if not isinstance(config, SamplingConfig):
            return config
        return config.replace(stop_token_ids=tuple(dict.fromkeys([*config.stop_token_ids, *self.end_token_ids])))

    def encode(self, prompts: Sequence[str], *, chat: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Tokenize prompts into left-padded rows: int32 ``[B, S]`` and their attention mask ``[B, S]``.

        Raises:
          InputError: no prompts, or one without tokens.
        """
        return encode_prompts(self.tokenizer, prompts, self.config.pad_token_id, chat=chat)

    def completions(
        self,
        prompts: Sequence[str],
        ids: np.ndarray,
        mask: np.ndarray,
        result: GenerationResult,
        *,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> list[Completion]:
        """Turn a result for :meth:`encode`'s rows into completions, prompt by prompt, sample by sample."""
        ends = (*self.end_token_ids, *stop_token_ids)
        return cut_completions(self.tokenizer, self.config.mask_token_id, prompts, ids, mask, result, ends, stop)

    # ---- scoring ----------------------------------------------------------------------------------------------

    def logits(self, input_ids: Any, attention_mask: Any = None) -> np.ndarray:
        """The model's output at every position, unshifted: numpy float32 ``[B, S, V]``, zero at padding.

        One forward pass; the logits are gathered to the host a chunk of positions at a time.
        """
        rows = read_rows(input_ids, attention_mask, self.config)
        return logits_of_rows(self.runner, rows)

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
        """Log-probabilities of given tokens under the shifted prediction for each position.

        The caller supplies ``input_ids`` noised as the estimator wants them (for coupled-GRPO three masked copies of
        each completion) and combines what comes back. Without ``attention_mask`` every position is attended and
        counted from 0, which is what the original's scoring pass does even for padded rows.

        Args:
          input_ids: integers ``[B, S]``.
          targets: integers ``[B, S]``, the token whose probability is wanted at each position.
          attention_mask: ``[B, S]``, left padding; None for none.
          temperature: divides the logits.
          width, batch: positions and rows to run at a time, where one program is to do for every call; see
            :func:`runtime.execution.scoring.score_rows`.

        Returns:
          numpy float32 ``[B, S]``, zero at padding.

        Raises:
          InputError: shapes, dtypes or ids that do not fit.
        """
        rows = read_rows(input_ids, attention_mask, self.config)
        wanted = read_rows(targets, attention_mask, self.config)
        if wanted.original.shape != rows.original.shape:
            raise InputError(
                f"targets are {list(wanted.original.shape)}, input_ids {list(rows.original.shape)}; "
                "they must be the same"
            )
        if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            raise InputError(
                f"temperature is {temperature}; expected a number from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
            )
        return score_rows(self.runner, rows, wanted, temperature, width, batch)

    def log_likelihoods(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Log-likelihoods under an autoregressive model; see :mod:`runtime.execution.likelihood`."""
        return log_likelihoods(self.runner, pairs)

    def estimate_log_likelihoods(self, pairs: Sequence[Pair], *, samples: int = 128, seed: int = 0) -> list[float]:
        """Monte Carlo estimates under a diffusion model; see :mod:`runtime.execution.likelihood`."""
        return estimate_log_likelihoods(self.runner, pairs, samples=samples, seed=seed)

    # ---- how rows meet the mesh -------------------------------------------------------------------------------

    def _prepare(
        self, input_ids: Any, attention_mask: Any, config: GenerationConfig, samples: int
    ) -> tuple[Rows, list[int]]:
        if isinstance(samples, bool) or not isinstance(samples, int) or not 1 <= samples <= 1 << 16:
            raise InputError(f"num_return_sequences is {samples!r}; expected an integer from 1 to 65536")
        rows = read_rows(input_ids, attention_mask, self.config)
        check_request(rows, self.config, config)
        seeds = row_seeds(config.seed, len(rows.lengths), samples)
        return rows.take([row for row in range(len(rows.lengths)) for _ in range(samples)]), seeds

    def _default_config(self) -> GenerationConfig:
        return SamplingConfig() if self.config.objective == "autoregressive" else DiffusionConfig()

    def _runs(
        self, rows: Rows, config: GenerationConfig, seeds: list[int], samples: int, whole: bool, hooked: bool = False
    ) -> Iterator[tuple[GenerationBatch, int]]:
        """Batches on the mesh, one after another, and how many there are; ``whole`` refuses to split."""
        canvas = self.runner.bucket(int(rows.lengths.max()) + config.max_new_tokens)
        count = len(rows.lengths)
        cached = _cached(config)
        size = self.runner.batch_size(count, canvas, cached)
        if whole and count > size:
            raise InputError(f"{count} rows at a time, and memory allows {size} on this mesh: give fewer rows")
        batches = math.ceil(count / size)
        kind = HookedBatch if hooked else GenerationBatch
        for part in self.runner.batches(count, canvas, cached):
            yield kind(self.runner, rows.take(part), config, seeds[part], canvas, size, samples), batches
