"""The workload to plan for: model, batch size, prompt and completion lengths, and the phases of a generation.

A phase is one kind of forward pass. The model's objective and the cache determine which phases a generation has.

Dimension letters: B batch, S canvas, W positions computed per row, T keys attended to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from runtime.decoding.block_schedule import block_schedule, steps_of_a_block, window_widths
from runtime.decoding.draft_chain import redrawn_chunk
from runtime.decoding.draft_counts import MAX_DRAFT_STEPS
from runtime.decoding.kinds import Choice, Integer, Kind
from runtime.decoding.parameters import (
    DEFAULT_BLOCK_LENGTH,
    EXPOSED_PARAMETERS,
    MAX_NEW_TOKENS,
    DiffusionConfig,
    SamplingConfig,
)
from runtime.decoding.sampling import SamplingRule
from runtime.decoding.schedule import masks_per_step
from runtime.decoding.windows import refresh_chunk
from runtime.execution.draft_models import DraftModel
from runtime.execution.rows import check_kind, published_config
from runtime.execution.runner import canvas_bucket, head_chunk, width_step
from runtime.execution.specialization import decode_program, sampling_rule
from runtime.models.config import STORED_DTYPES, ModelConfig, UnmaskingSchedule
from runtime.models.declarations import ModelLayout
from runtime.models.families import model_layout
from runtime.models.quantization import QUANTIZATIONS
from sharding.errors import InputError
from sharding.mesh import MeshSpec

MAX_BATCH = 1 << 20
# Types and bounds of a workload's fields, except decoding parameters, whose bounds are in EXPOSED_PARAMETERS.
_KINDS: dict[str, Kind] = {
    "batch": Integer(1, MAX_BATCH),
    "prompt": Integer(1, 1 << 24),
    "new_tokens": Integer(1, MAX_NEW_TOKENS),
    "quantization": Choice(QUANTIZATIONS),
    "dtype": Choice(STORED_DTYPES),
    # "auto" depends on the mesh, which a workload does not know.
    "draft_steps": Integer(0, MAX_DRAFT_STEPS),
}


_DECODING = ("steps", "cache", "block_length", "draft_axis")


@dataclass(frozen=True)
class Phase:
    """One kind of forward pass of a generation.

    Attributes:
      name: ``denoise step``, ``refresh``, ``block step``, ``prefill`` or ``decode``.
      rows: rows per ``data`` shard that are computed together.
      positions: W, positions computed per row, before sharding over ``sequence``; for the windows of a prefix cache, an
        average.
      keys: T, keys that each position attends to.
      whole: whether whole rows are computed; otherwise windows with a cache.
      chunk: positions per row that the head runs on at a time.
      chunks: average number of head chunks per pass.
      forwards: average number of passes of this kind in one generation.
      canvases: with drafts, canvases of all rows that a device computes in a pass; otherwise 0, for one of each row.
      draft_runs: with drafts, average number of head runs per pass; otherwise 0, for one of each chunk.
    """

    name: str
    rows: int
    positions: int
    keys: int
    whole: bool
    chunk: int
    chunks: float
    forwards: float
    canvases: int = 0
    draft_runs: float = 0.0

    @property
    def head_runs(self) -> float:
        """Average number of head runs per pass. Each of them reads the head's weights."""
        return self.draft_runs or self.chunks

    @property
    def computed(self) -> int:
        """Number of canvases that a device computes in a pass."""
        return self.canvases or self.rows

    def head_shards(self, layout: ModelLayout) -> int:
        """Return over how many ``sequence`` shards the positions of a head chunk are divided.

        Windows and single positions are not divided: every shard computes them.
        """
        return layout.spec.sequence if self.whole and self.chunk > 1 else 1


@dataclass(frozen=True)
class Workload:
    """A batch to generate.

    Attributes:
      config: the model's configuration.
      dtype: dtype of weights and activations.
      batch: B, rows that are generated together.
      prompt: tokens per prompt.
      new_tokens: tokens to generate per row.
      steps: denoise steps of masked diffusion, divided among the blocks. A canvas of variable length has as many as it
        takes to reach its limit.
      cache: ``none``, ``prefix`` or ``dual`` for masked diffusion, ``none`` or ``exact`` with block-causal attention;
        autoregressive models always use a cache.
      block_length: positions per block with a cache; without a cache, the published settings determine the blocks.
      quantization: quantization of the weights: ``none``, ``int8`` or ``int4``.
      draft_steps: drafts per row of masked diffusion. The plan assumes that none is accepted, because the steps that
        drafts save depend on the text.
      draft_axis: ``data`` divides the canvases of a pass over the ``data`` axis, with all rows on each of its shards.
      draft: the draft model of an autoregressive model. A plan counts its weights and its cache, and not its passes,
        because the passes that drafts save depend on the text.
    """

    config: ModelConfig
    dtype: str = "bfloat16"
    batch: int = 1
    prompt: int = 256
    new_tokens: int = 256
    steps: int = 256
    cache: str = "none"
    block_length: int = DEFAULT_BLOCK_LENGTH
    quantization: str = "none"
    draft_steps: int = 0
    draft_axis: str = "none"
    draft: DraftModel | None = None

    def __post_init__(self) -> None:
        kinds = _KINDS | {name: EXPOSED_PARAMETERS[name].kind for name in _DECODING}
        for name, kind in kinds.items():
            kind.read(name, getattr(self, name))
        # The decoder keeps its default windows if there are fewer new tokens.
        longest = max(self.new_tokens, self.config.attention_block_length or DEFAULT_BLOCK_LENGTH)
        if self.block_length > longest and self.cache != "none":
            raise InputError(
                f"block_length is {self.block_length}; expected 1 to {longest} with {self.new_tokens} new tokens",
                field="block_length",
            )
        check_kind(self.config, self.sampling() if self.config.objective == "autoregressive" else self.decoding())
        if self.prompt + self.new_tokens > self.config.max_positions:
            raise InputError(
                f"{self.prompt} prompt tokens and {self.new_tokens} new tokens are {self.prompt + self.new_tokens} "
                f"positions; the model allows {self.config.max_positions}",
                field="new_tokens",
            )

    @property
    def item(self) -> int:
        """Bytes per number."""
        return 4 if self.dtype == "float32" else 2

    def layout(self, spec: MeshSpec, devices: Any = None) -> ModelLayout:
        """Lay the model out on a mesh.

        Raises:
          MeshError: the model cannot be divided over the mesh.
        """
        made = model_layout(self.config, spec, devices, self.quantization)
        return replace(made, rules=replace(made.rules, batch=())) if self.divides_drafts else made

    @property
    def divides_drafts(self) -> bool:
        """Whether the canvases of a pass are divided over the ``data`` axis."""
        return self.draft_steps > 0 and self.draft_axis == "data"

    @property
    def has_cache(self) -> bool:
        """Whether the generation uses a KV cache."""
        return self.config.objective == "autoregressive" or self.cache != "none"

    def rows(self, data: int) -> int:
        """Return the number of rows on the devices: the batch, padded so that canvases divide over the data axis."""
        unit = data // math.gcd(data, 1 + self.draft_steps) if self.divides_drafts else data
        return math.ceil(self.batch / unit) * unit

    def rows_per_shard(self, data: int) -> int:
        """Return the number of rows on each ``data`` shard."""
        return self.rows(data) if self.divides_drafts else self.rows(data) // data

    def canvas(self, layout: ModelLayout, platform: str) -> int:
        """Return S, the bucket that prompt and new tokens are padded to."""
        return canvas_bucket(self.prompt + self.new_tokens, layout, platform)

    def chunk(self, layout: ModelLayout, platform: str) -> int:
        """Return how many positions per row the head of a diffusion model runs on at a time."""
        return head_chunk(self.rows(layout.spec.data), self.canvas(layout, platform), layout, platform)

    def decoding(self) -> DiffusionConfig:
        """Return the decoding settings for masked diffusion: the published ones, with the workload's steps and cache.

        The plan assumes the schedule instead of a published parallel rule, because the steps that a rule saves depend
        on the text.
        """
        changes: dict[str, Any] = {"cache": self.cache, "parallel": "none", "threshold": DiffusionConfig.threshold}
        changes |= {"draft_steps": self.draft_steps, "draft_axis": self.draft_axis}
        if self.cache != "none":
            changes["block_length"] = self.block_length
        # Models without a number of steps refuse it, unless it is the workload's default.
        if not self.config.family.variable_length or self.steps != Workload.steps:
            changes["steps"] = self.steps
        found = published_config(self.config, "", max_new_tokens=self.new_tokens, **changes)
        assert isinstance(found, DiffusionConfig), "only diffusion models have denoise steps"
        return found

    def masks_of_blocks(self, canvas: int) -> list[tuple[int, ...]]:
        """Return, for each block of new tokens, the number of masks in the block before each of its forward passes.

        Args:
          canvas: S, positions of the canvas.
        """
        decoding, schedule = self.decoding(), self.config.family.schedule
        if self.config.family.variable_length:
            # Every new token is committed. All but those that a row starts with were expansions before.
            least = min(decoding.initial_masks, self.new_tokens)
            return [(*range(least, self.new_tokens), *range(self.new_tokens, 0, -1))]
        assert schedule is not None, "a family that denoises has a schedule"
        length, _ = block_schedule(decoding, canvas)
        steps = steps_of_a_block(decoding, length)
        masks = [min(length, self.new_tokens - start) for start in range(0, self.new_tokens, length)]
        return [_masks_of_passes(schedule, count, steps, decoding.eps, length) for count in masks]

    def sampling(self) -> SamplingConfig:
        """Return the decoding settings for autoregressive models: typical nucleus sampling."""
        return SamplingConfig(self.new_tokens, temperature=0.7, top_p=0.9)

    def sampling_rule(self) -> SamplingRule:
        """Return the rule that chooses tokens from logits."""
        if self.config.objective == "autoregressive":
            return decode_program(self.sampling(), self.config.vocab_size).sampling
        return sampling_rule(self.decoding(), self.config, self.dtype)

    def windows(self, layout: ModelLayout, platform: str) -> tuple[int, ...]:
        """Return the widths of the windows for which block steps are compiled, widest first."""
        offset = self.config.family.prediction_offset
        return window_widths(self.cache, self.block_length, self.span(layout, platform), offset=offset)

    def span(self, layout: ModelLayout, platform: str) -> int:
        """Return the number of positions from a row's first mask to its end, padded to a bucket."""
        return min(self.canvas(layout, platform), canvas_bucket(self.new_tokens, layout, platform))

    def phases(self, layout: ModelLayout, platform: str, widest: bool = False) -> list[Phase]:
        """Return the phases of one generation.

        Args:
          layout: the model's layout on the mesh.
          platform: platform of the devices.
          widest: describe windows by their largest width, for memory estimates, instead of by their average width.
        """
        canvas, rows = self.canvas(layout, platform), self.rows_per_shard(layout.spec.data)
        if self.config.objective == "autoregressive":
            # The rows of a batch are known in advance, so the prompts are padded as those of an engine's batch.
            step = width_step(layout, platform, known=True)
            width = min(canvas, math.ceil(self.prompt / step) * step)
            return [
                Phase("prefill", rows, width, width, True, 1, 1.0, 1),
                Phase("decode", rows, 1, canvas, False, 1, 1.0, max(0, self.new_tokens - 1)),
            ]
        chunk = self.chunk(layout, platform)

        def chunks(masks: Sequence[int], chunk: int) -> float:
            # The head runs on a chunk of every row of a shard at once. Here all rows have equally many masks.
            return sum(math.ceil(count / chunk) for count in masks) / max(1, len(masks))

        if self.cache == "none":
            masked = [count for block in self.masks_of_blocks(canvas) for count in block]
            found = Phase("denoise step", rows, canvas, canvas, True, chunk, chunks(masked, chunk), len(masked))
            return [self._drafted(found, layout.spec) if self.draft_steps else found]
        if self.cache == "exact":
            return self._exact_phases(layout, platform, widest)
        decoding = self.decoding()
        length, _ = block_schedule(decoding, canvas)
        starts = range(0, self.new_tokens, length)
        # The first pass of each block is a refresh, which computes the whole canvas of one row at a time. The other
        # passes compute a window of every row: the block (dual), or the block and everything after it (prefix).
        passes = self.masks_of_blocks(canvas)
        widths = self.windows(layout, platform)
        offset = self.config.family.prediction_offset
        needed = [offset + (length if self.cache == "dual" else self.new_tokens - start) for start in starts]
        width = widths[0]
        if not widest:
            width = round(sum(min(one for one in widths if one >= least) for least in needed) / len(needed))
        window, masks = min(chunk, width), [count for block in passes for count in block[1:]]
        refresh = refresh_chunk(chunk, widths[-1] - offset, layout.spec.sequence)
        first = chunks([block[0] for block in passes], refresh)
        # If refreshes commit everything, no block step runs, but the program still contains one.
        block = Phase("block step", rows, width, canvas, False, window, chunks(masks or [length], window), len(masks))
        return [
            Phase("refresh", 1, canvas, canvas, True, refresh, first, len(passes) * rows),
            self._drafted(block, layout.spec) if decoding.drafts else block,
        ]

    def _drafted(self, phase: Phase, spec: MeshSpec) -> Phase:
        """Return a step with drafts: further canvases, and further head chunks that guess their tokens."""
        # All open positions once more, and for each draft a small chunk that draws its tokens.
        drawn = self.draft_steps * self.sampling_rule().sampled
        chunks = 2 * phase.chunks + drawn * min(1.0, redrawn_chunk(spec.sequence) / phase.chunk)
        canvases = phase.rows * (1 + self.draft_steps) // (spec.data if self.divides_drafts else 1)
        return replace(phase, canvases=canvases, chunks=chunks, draft_runs=2 * phase.chunks + drawn)

    def _exact_phases(self, layout: ModelLayout, platform: str, widest: bool) -> list[Phase]:
        """Return the phases of a generation with block-causal attention and its exact cache.

        The first pass computes the whole row, and each later pass computes one block. The first pass of a block is
        different: it also computes the block before it. With a shifted output, it computes only the block before it,
        whose last position predicts the block's first token.
        """
        canvas, rows = self.canvas(layout, platform), self.rows_per_shard(layout.spec.data)
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
def _masks_of_passes(
    schedule: UnmaskingSchedule, masked: int, steps: int, eps: float, block_length: int
) -> tuple[int, ...]:
    """Return the number of masks before each forward pass of a block. A step that commits nothing runs no pass."""
    left = masked
    found: list[int] = []
    for count in masks_per_step(schedule, masked, steps, eps=eps, block_length=block_length):
        if count:
            found.append(left)
            left -= count
    return tuple(found)
