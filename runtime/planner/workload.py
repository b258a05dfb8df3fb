"""The workload to plan for: a model, rows, prompts, new tokens, and the phases of one generation.

A phase is one kind of forward pass; which phases there are follows from the model's objective and from the cache.

Dimension letters: B batch, S canvas, W positions computed a row, T keys attended to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime.decoding.block_schedule import block_schedule, steps_of_a_block, window_widths
from runtime.decoding.cached_steps import refresh_chunk
from runtime.decoding.parameters import CACHES, DiffusionConfig, SamplingConfig
from runtime.decoding.sampling import SamplingRule
from runtime.decoding.schedule import transfer_ratios
from runtime.execution.rows import bucket_length, check_blocks, with_model_blocks
from runtime.execution.runner import canvas_bucket, head_chunk
from runtime.execution.specialization import decode_program, sampling_rule
from runtime.models.config import STORED_DTYPES, ModelConfig
from runtime.models.declarations import ModelLayout
from runtime.models.families import model_layout
from runtime.models.quantization import QUANTIZATIONS
from sharding.errors import InputError
from sharding.mesh import MeshSpec

MAX_BATCH = 1 << 20


@dataclass(frozen=True)
class Phase:
    """One kind of forward pass of a generation.

    Attributes:
      name: ``denoise step``, ``refresh``, ``block step``, ``prefill`` or ``decode``.
      positions: W, computed for each row; over ``sequence`` when ``whole``; a mean for a prefix cache's windows.
      keys: T, that each position attends to.
      rows: of each shard of data, computed together.
      whole: whole rows are computed, else a window of each against the cache.
      chunk: positions of each row that the head is run on at a time.
      chunks: how often it is run in a pass; a mean.
      forwards: passes of this kind in one generation; a mean.
    """

    name: str
    rows: int
    positions: int
    keys: int
    whole: bool
    chunk: int
    chunks: float
    forwards: float

    def head_shards(self, layout: ModelLayout) -> int:
        """Shards of ``sequence`` that share a chunk's positions; a window's and a lone position are whole on each."""
        return layout.spec.sequence if self.whole and self.chunk > 1 else 1


@dataclass(frozen=True)
class Workload:
    """A batch to generate.

    Attributes:
      config: the model.
      dtype: of weights and activations.
      batch: B, rows that are generated together.
      prompt: tokens of each prompt.
      new_tokens: tokens to generate for each row.
      steps: denoise steps of masked diffusion; with a cache they are shared among the blocks.
      cache: ``none``, ``prefix`` or ``dual`` for masked diffusion, ``none`` or ``exact`` with block-causal attention;
        an autoregressive model always has one.
      block_length: positions of a block, with a cache.
      quantization: ``none``, or ``int8`` for weights.
    """

    config: ModelConfig
    dtype: str = "bfloat16"
    batch: int = 1
    prompt: int = 256
    new_tokens: int = 256
    steps: int = 256
    cache: str = "none"
    block_length: int = 32
    quantization: str = "none"

    def __post_init__(self) -> None:
        limits = {"batch": (1, MAX_BATCH), "prompt": (1, 1 << 24), "new_tokens": (1, 1 << 20), "steps": (1, 1 << 16)}
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise InputError(f"{name} is {getattr(self, name)}; expected a number from {low} to {high}")
        if not 1 <= self.block_length <= self.new_tokens and self.cache != "none":
            raise InputError(f"block_length is {self.block_length}; expected 1 to new_tokens ({self.new_tokens})")
        if self.cache not in CACHES:
            raise InputError(f'cache "{self.cache}" is not one of {", ".join(CACHES)}')
        if self.config.objective == "masked_diffusion":
            check_blocks(self.config, self.decoding())
        if self.quantization not in QUANTIZATIONS:
            raise InputError(f'quantization "{self.quantization}" is not one of {", ".join(QUANTIZATIONS)}')
        if self.dtype not in STORED_DTYPES:
            raise InputError(f'dtype "{self.dtype}" is not one of {", ".join(STORED_DTYPES)}')
        if self.prompt + self.new_tokens > self.config.max_positions:
            raise InputError(
                f"{self.prompt} prompt tokens and {self.new_tokens} new ones make {self.prompt + self.new_tokens}; "
                f"the model allows {self.config.max_positions} in all"
            )

    @property
    def item(self) -> int:
        """Bytes of one number."""
        return 4 if self.dtype == "float32" else 2

    def layout(self, spec: MeshSpec, devices: Any = None) -> ModelLayout:
        """The model on a mesh.

        Raises:
          MeshError: it does not divide.
        """
        return model_layout(self.config, spec, devices, self.quantization)

    @property
    def has_cache(self) -> bool:
        """Whether keys and values are kept from pass to pass."""
        return self.config.objective == "autoregressive" or self.cache != "none"

    def rows(self, data: int) -> int:
        """Rows on the devices: the batch, padded to a multiple of the data axis."""
        return math.ceil(self.batch / data) * data

    def canvas(self, layout: ModelLayout, platform: str) -> int:
        """S, the length that prompt and new tokens are run at."""
        return canvas_bucket(self.prompt + self.new_tokens, layout, platform)

    def chunk(self, layout: ModelLayout, platform: str) -> int:
        """Positions of each row that the head of masked diffusion is run on at a time."""
        return head_chunk(self.rows(layout.spec.data), self.canvas(layout, platform), layout, platform)

    def decoding(self) -> DiffusionConfig:
        """How masked diffusion decodes: the published settings."""
        blocks: dict[str, Any] = (
            {} if self.cache == "none" else {"cache": self.cache, "block_length": self.block_length}
        )
        in_blocks = self.config.family.attention == "block_causal"
        settings = self.config.family.published_settings("") if in_blocks else {}
        # Planned for is the schedule: what a parallel rule saves depends on the text.
        own = {name: value for name, value in settings.items() if name not in ("cache", "parallel", "threshold")}
        made = DiffusionConfig.published(self.new_tokens, **own | blocks, steps=self.steps)
        return with_model_blocks(made, self.config)

    def sampling(self) -> SamplingConfig:
        """How an autoregressive model decodes: with a nucleus, as is usual."""
        return SamplingConfig(self.new_tokens, temperature=0.7, top_p=0.9)

    def sampling_rule(self) -> SamplingRule:
        """How tokens are chosen from logits."""
        if self.config.objective == "autoregressive":
            return decode_program(self.sampling(), self.config.vocab_size).sampling
        return sampling_rule(self.decoding(), self.config.vocab_size, self.dtype)

    def windows(self, layout: ModelLayout, platform: str) -> tuple[int, ...]:
        """Widths of the windows that steps of a block are compiled for, the widest first."""
        offset = self.config.family.prediction_offset
        return window_widths(self.cache, self.block_length, self.span(layout, platform), offset=offset)

    def span(self, layout: ModelLayout, platform: str) -> int:
        """Positions from the first mask of a row to its end, as programs are compiled for them."""
        return min(self.canvas(layout, platform), canvas_bucket(self.new_tokens, layout, platform))

    def phases(self, layout: ModelLayout, platform: str, widest: bool = False) -> list[Phase]:
        """The forward passes of one generation.

        Args:
          layout: on which mesh.
          platform: of its devices.
          widest: windows of several widths at the widest, as memory has to be for, instead of at their mean.
        """
        canvas, rows = self.canvas(layout, platform), self.rows(layout.spec.data) // layout.spec.data
        if self.config.objective == "autoregressive":
            width = min(canvas, bucket_length(self.prompt))
            return [
                Phase("prefill", rows, width, width, True, 1, 1.0, 1),
                Phase("decode", rows, 1, canvas, False, 1, 1.0, max(0, self.new_tokens - 1)),
            ]
        chunk = self.chunk(layout, platform)

        def chunks(masks: Sequence[int], chunk: int) -> float:
            # The head runs whole chunks, as many as the row with most masks needs.
            return sum(math.ceil(count / chunk) for count in masks) / max(1, len(masks))

        if self.cache == "none":
            masked = _masks_of_passes(self.new_tokens, self.steps)
            return [Phase("denoise step", rows, canvas, canvas, True, chunk, chunks(masked, chunk), len(masked))]
        if self.cache == "exact":
            return self._exact_phases(layout, platform, widest)
        length, block_steps = block_schedule(self.decoding(), canvas)
        starts = range(0, self.new_tokens, length)
        # Of each block the first pass is a refresh, of the whole canvas, one row at a time; the others compute a window
        # of every row: the block, or it and all that follows.
        passes = [_masks_of_passes(min(length, self.new_tokens - start), block_steps) for start in starts]
        widths = self.windows(layout, platform)
        offset = self.config.family.prediction_offset
        needed = [offset + (length if self.cache == "dual" else self.new_tokens - start) for start in starts]
        width = widths[0]
        if not widest:
            width = round(sum(min(one for one in widths if one >= least) for least in needed) / len(needed))
        window, masks = min(chunk, width), [count for block in passes for count in block[1:]]
        refresh = refresh_chunk(chunk, widths[-1] - offset, layout.spec.sequence)
        first = chunks([block[0] for block in passes], refresh)
        return [
            Phase("refresh", 1, canvas, canvas, True, refresh, first, len(passes) * rows),
            # Where a refresh does all there is no window to run, and still one in the program.
            Phase("block step", rows, width, canvas, False, window, chunks(masks or [length], window), len(masks)),
        ]

    def _exact_phases(self, layout: ModelLayout, platform: str, widest: bool) -> list[Phase]:
        """The forward passes of a generation with block-causal attention and its exact cache.

        A row is read whole once. Every later pass computes its block; the first one of a block computes the block
        before it too, or, where that predicts the first position alone, in its place.
        """
        canvas, rows = self.canvas(layout, platform), self.rows(layout.spec.data) // layout.spec.data
        length, widths = self.block_length, self.windows(layout, platform)
        steps = min(length, steps_of_a_block(self.decoding(), length))
        blocks = math.ceil(self.new_tokens / length)
        width = widths[0] if widest else round((widths[0] + (steps - 1) * widths[-1]) / steps)
        refresh = refresh_chunk(self.chunk(layout, platform), length, layout.spec.sequence)
        window = min(self.chunk(layout, platform), width)
        return [
            Phase("refresh", 1, canvas, canvas, True, refresh, math.ceil(length / refresh), rows),
            Phase("block step", rows, width, canvas, False, window, math.ceil(length / window), blocks * steps - 1),
        ]


@functools.lru_cache(maxsize=256)
def _masks_of_passes(masked: int, steps: int) -> tuple[int, ...]:
    """Masks of a row, or of a block of it, before each forward pass; a step that transfers nothing runs none."""
    left = masked
    found: list[int] = []
    for ratio in transfer_ratios(steps, 1e-3):
        count = int(left * ratio)
        if count:
            found.append(left)
            left -= count
    return tuple(found)
