"""The engine: a model on a mesh, with calls to generate, stream and score text.

Dimension letters: B batch, S length of the token arrays, padding included.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import CheckpointError, CheckpointFolder, load_weights, open_folder
from checkpoints.loading import Progress, check_weights, kept_quantization
from runtime.decoding.parameters import DiffusionConfig
from runtime.execution.left_padding import unpadded_rows
from runtime.execution.options import check_options
from runtime.execution.requests import StopTest
from runtime.execution.result import GenerationResult
from runtime.execution.rows import check_samples, published_config
from runtime.execution.runner import Runner, check_attention
from runtime.execution.token_engine import GenerationConfig, TokenEngine
from runtime.models.config import ModelConfig
from runtime.models.declarations import ModelLayout
from runtime.models.families import Weights, model_layout, parse_config
from runtime.models.random_weights import random_weights
from runtime.planner.default import choose_layout
from runtime.text.completions import Completion, CompletionBuilder, final_prefixes, read_stop, stop_tests, stream_texts
from runtime.text.draft_checkpoint import draft_model, load_draft, open_draft
from runtime.text.tokenizer import TextTokenizer, encode_prompts, end_tokens
from sharding.errors import InputError
from sharding.mesh import MeshSpec

logger = logging.getLogger("diffumesh")


class Engine(TokenEngine):
    """A model on a mesh, with its tokenizer.

    Attributes:
      notes: one sentence for each setting that was chosen automatically, such as the mesh or the dtype.
      loaded: how many bytes this host loaded from the checkpoint; None if the weights are not from a checkpoint.
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
        draft: Runner | None = None,
    ) -> None:
        """Create an engine from weights that have the shapes and shardings of ``layout``; see :meth:`load`."""
        super().__init__(Runner(layout, weights, attention, max_batch, kv_cache, draft))
        self.notes: list[str] = []
        self._folder = folder

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
        lora: str | Path | CheckpointFolder | None = None,
        draft: str | Path | CheckpointFolder | None = None,
        revision: str | None = None,
        draft_revision: str | None = None,
        token: str | None = None,
        offline: bool = False,
        verify: str = "full",
        progress: Progress | None = None,
    ) -> Engine:
        """Load a Hugging Face or converted checkpoint onto a mesh.

        Args:
          path: a folder, a URL that fsspec can read, or a Hub name; see :func:`checkpoints.open_folder`.
          mesh: such as ``"data=2,tensor=4"``; -1 stands for all remaining devices. By default, the planner chooses.
          dtype: ``bfloat16``, ``float32`` or ``float16``. The default is the stored dtype, except float32 on CPU.
          attention: attention implementation: ``auto``, ``xla``, ``cudnn`` or ``splash``.
          devices: devices to use; all by default.
          max_batch: maximum number of rows on the devices at a time. The default is what memory allows.
          quantize: ``int8`` or ``int4`` weights (int4 in layers only). A quantized checkpoint stays as it is stored.
          kv_cache: dtype of cached keys and values: ``model``, ``bfloat16``, ``float32`` or ``int8``.
          rows: expected number of rows per batch, a hint for the default mesh.
          lora: folder, URL or Hub name of a LoRA adapter in PEFT's layout, merged while the weights are read.
          draft: folder, URL or Hub name of a draft model with the same vocabulary, loaded with the same options.
          revision, draft_revision, token, offline: Hub revisions and access token; ``offline`` forbids network access.
          verify: ``full`` checks all digests, if any; ``sizes`` small files, shapes and dtypes; ``none`` nothing.
          progress: function that is called with the number of bytes read so far and the total number of bytes.

        Raises:
          CheckpointError, ConfigError, MeshError, InputError: the checkpoint, the mesh or an argument is wrong.
        """
        check_options(dtype=dtype, attention=attention, kv_cache=kv_cache, quantize=quantize, verify=verify)
        spec = MeshSpec.read(mesh)
        folder, drafting = _open_models(path, lora, draft, (revision, draft_revision), token, offline, verify)
        config = parse_config(folder.config)
        # Check files and divisibility first, so that an error is raised before JAX initialises its devices.
        stored = check_weights(folder, model_layout(config), verify) or config.dtype
        fitting: dict[str, Any] = {"stored": stored, "quantize": kept_quantization(folder, quantize)}
        fitting |= {"rows": min(rows, max(max_batch or rows, 1)), "draft": draft_model(drafting, quantize)}
        layout, dtype, notes = choose_layout(config, spec, devices, dtype, **fitting)
        check_attention(layout, attention, dtype)
        kept: dict[str, Any] = {"attention": attention, "kv_cache": kv_cache}
        beside = None if drafting is None else load_draft(drafting, layout, dtype, quantize, verify, **kept)
        weights, loaded = load_weights(folder, layout, dtype, progress, verify)
        engine = cls(layout, weights, folder=folder, max_batch=max_batch, draft=beside, **kept)
        engine.notes, engine.loaded = notes, loaded
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
        devices: Sequence[Any] | None = None,
        quantize: str = "none",
        **options: Any,
    ) -> Engine:
        """Create an engine with random weights, the same on every mesh, for benchmarks and tests; see :meth:`load`.

        Raises:
          MeshError: the weights do not fit on the devices.
        """
        spec = MeshSpec.read(mesh)
        layout, _, _ = choose_layout(config, spec, devices, dtype, quantize=quantize)
        return cls(layout, random_weights(layout, seed, dtype), **options)

    @property
    def tokenizer(self) -> TextTokenizer:
        """The checkpoint's tokenizer.

        Raises:
          CheckpointError: the checkpoint has none.
        """
        if (found := self._own_tokenizer) is None:
            raise CheckpointError(
                "this checkpoint has no tokenizer (tokenizer.json, or vocab.json and merges.txt); "
                "only token-level calls are available"
            )
        return found

    @functools.cached_property
    def _own_tokenizer(self) -> TextTokenizer | None:
        return None if self._folder is None else TextTokenizer.from_folder(self._folder)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a completion, from the model config, the generation config and the tokenizer."""
        assert self.tokenizer is not None  # the property raises if there is none
        return self.known_end_tokens()

    def known_end_tokens(self) -> tuple[int, ...]:
        """Return the end tokens. Unlike :attr:`end_token_ids`, this works without a tokenizer, from the configs."""
        known = super().known_end_tokens
        return known() if self._folder is None else end_tokens(self.config, self._folder, self._own_tokenizer)

    def published(self, **overrides: Any) -> GenerationConfig:
        """Return the decoding settings that the authors publish for this checkpoint, changed by ``overrides``."""
        names = "" if self._folder is None else self._folder.model_names
        return published_config(self.config, names, **overrides)

    def generate(
        self,
        prompts: str | Sequence[str],
        config: GenerationConfig | None = None,
        *,
        chat: bool = False,
        num_return_sequences: int = 1,
        stop: str | Sequence[str] = (),
        suffixes: str | Sequence[str] = (),
    ) -> list[Completion]:
        """Complete texts. The list has all completions of the first prompt, then those of the second, and so on.

        Args:
          prompts: one text or several. Mask tokens written in a prompt (such as ``<|mask|>``) are filled too.
          config: decoding settings, see :meth:`generate_tokens`. Rows stop early unless ``early_stop`` is false.
          chat: treat each prompt as a user's message, and apply the checkpoint's chat template.
          num_return_sequences: number of completions per prompt.
          stop: the string or strings that end a completion; also the texts of special tokens.
          suffixes: for infilling, the text that follows each prompt's completion. The model sees it. Empty for none.

        Raises:
          InputError: a prompt is empty, or :meth:`generate_tokens` rejects the prompts or the configuration.
          CheckpointError: the checkpoint has no tokenizer, or no chat template.
        """
        ids, mask, after = encode_prompts(self.tokenizer, prompts, self.config, suffixes=suffixes, chat=chat)
        config, samples = self.with_end_tokens(config), num_return_sequences
        check_samples(samples)
        stop = read_stop(stop, self.config, unpadded_rows(ids, mask))
        tests = self.stop_tests([stop] * (len(ids) * samples), config.stop_token_ids)
        options: dict[str, Any] = {"num_return_sequences": samples, "stop_tests": tests, "suffixes": after}
        result = self.generate_tokens(ids, mask, config, **options)
        ends: dict[str, Any] = {"stop": stop, "stop_token_ids": config.stop_token_ids}
        return self.completions(prompts, ids, mask, result, suffixes=suffixes, **ends)

    def stream(
        self,
        prompts: str | Sequence[str],
        config: GenerationConfig | None = None,
        *,
        chat: bool = False,
        stop: str | Sequence[str] = (),
        every: int = 1,
        suffixes: str | Sequence[str] = (),
    ) -> Iterator[Any]:
        """Complete a text and yield pieces of the completion as they become final.

        For several texts, yield tuples with a piece per text. See :meth:`generate` for the arguments. With a diffusion
        model, text is final once no mask is left before it, so it arrives more evenly with ``block_length``. ``every``
        is the number of steps or tokens between two updates.
        """
        ids, mask, after = encode_prompts(self.tokenizer, prompts, self.config, suffixes=suffixes, chat=chat)
        config = self.with_end_tokens(config)
        canvases = self.stream_tokens(ids, mask, config, every=every, suffixes=after)
        masked = self.config.mask_token_id if isinstance(config, DiffusionConfig) else None
        prefixes = final_prefixes(canvases, ids.shape[1], masked)
        stop = read_stop(stop, self.config, unpadded_rows(ids, mask))
        pieces = stream_texts(self.tokenizer, prefixes, (*self.end_token_ids, *config.stop_token_ids), stop)
        return (piece for (piece,) in pieces) if isinstance(prompts, str) else pieces

    def score(self, input_ids: Any, targets: Any = None, attention_mask: Any = None, **options: Any) -> Any:
        """Compute log-probabilities of tokens: float32 ``[B, S]``; ``[S]`` for one text, a list of these for several.

        A text is scored against its own tokens. Token ids ``[B, S]`` need ``targets`` ``[B, S]``, the token to score at
        each position; ``attention_mask`` is 0 for padding on the left. ``temperature`` divides the logits; ``width``
        and ``batch`` fix the padded length and the rows per pass, so that one program serves every call. The first
        token of an autoregressive row, which nothing predicts, has 0.
        """
        texts = [input_ids] if isinstance(input_ids, str) else input_ids
        if targets is not None or not (isinstance(texts, Sequence) and texts and isinstance(texts[0], str)):
            return super().score(input_ids, targets, attention_mask, **options)
        if attention_mask is not None:
            raise InputError("attention_mask is for token ids; texts are padded here")
        ids, mask = self.encode(texts)
        found = unpadded_rows(super().score(ids, ids, mask, **options), mask)
        return found[0] if isinstance(input_ids, str) else found

    def with_end_tokens(self, config: GenerationConfig | None) -> GenerationConfig:
        """Return a copy of a configuration whose stop tokens include the end tokens, unless ``early_stop`` is false."""
        return self._resolved(config).with_end_tokens(self.end_token_ids, default=True)

    def stop_tests(self, stops: Sequence[Sequence[str]], stop_token_ids: Sequence[int] = ()) -> list[StopTest | None]:
        """Return a test per row that ends it at its stop strings (None if it has none), for :meth:`generate_tokens`."""
        return stop_tests(self.tokenizer, (*self.end_token_ids, *stop_token_ids), stops)

    def encode(self, prompts: str | Sequence[str], *, chat: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Tokenize prompts into left-padded rows: int32 ``[B, S]`` and their attention mask ``[B, S]``."""
        return encode_prompts(self.tokenizer, prompts, self.config, chat=chat)[:2]

    def completions(
        self,
        prompts: str | Sequence[str],
        ids: np.ndarray,
        mask: np.ndarray,
        result: GenerationResult,
        *,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        suffixes: str | Sequence[str] = (),
    ) -> list[Completion]:
        """Build completions from a result of :meth:`generate_tokens`, in the order of the prompts of :meth:`encode`."""
        texts, after = ([text] if isinstance(text, str) else text for text in (prompts, suffixes))
        builder = CompletionBuilder(self.tokenizer, self.config.mask_token_id, (*self.end_token_ids, *stop_token_ids))
        return builder.build_batch(texts, ids, mask, result, read_stop(stop, self.config), after)


def _open_models(
    path: str | Path | CheckpointFolder,
    lora: str | Path | CheckpointFolder | None,
    draft: str | Path | CheckpointFolder | None,
    revisions: tuple[str | None, str | None],
    token: str | None,
    offline: bool,
    verify: str,
) -> tuple[CheckpointFolder, CheckpointFolder | None]:
    """Open the checkpoints of a model and of its draft model, None without one, each at its own revision."""
    hub: dict[str, Any] = {"token": token, "offline": offline}
    folder = open_folder(path, revision=revisions[0], lora=lora, **hub)
    if draft is None and revisions[1] is not None:
        raise InputError("draft_revision requires draft", field="draft_revision")
    return folder, None if draft is None else open_draft(folder, draft, revision=revisions[1], verify=verify, **hub)
