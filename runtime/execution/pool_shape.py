"""The specification of a pool, and what follows from it: number of slots, memory, cost of a pass, and buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.decoding.block_schedule import block_schedule, window_widths
from runtime.decoding.kinds import ParameterError
from runtime.decoding.parameters import DEFAULT_BLOCK_LENGTH, DiffusionConfig, SamplingConfig
from runtime.execution.buckets import MAX_PROGRAMS, MOVE_ROOM, Grid, PassCost, make_grid
from runtime.execution.memory import Memory
from runtime.execution.rows import check_kind, with_model_blocks
from runtime.execution.runner import Runner, weight_bytes
from runtime.execution.specialization import divides_drafts, generalized, with_own_drafts
from runtime.models.kv_cache import cache_bytes_per_device
from sharding.errors import InputError

GenerationConfig = DiffusionConfig | SamplingConfig


def uses_cache(config: GenerationConfig) -> bool:
    """Return whether rows of this configuration have a KV cache."""
    return config.use_cache if isinstance(config, SamplingConfig) else config.cache != "none"


def canvases_of(config: GenerationConfig) -> int:
    """Return how many canvases of each row a forward pass computes: its own, and its drafts."""
    return 1 if isinstance(config, SamplingConfig) else 1 + config.drafts


def tokens_per_pass(config: GenerationConfig) -> int:
    """Return the most tokens that a pass adds to an autoregressive row: one, and its drafts; 1 for diffusion."""
    return 1 + config.drafts if isinstance(config, SamplingConfig) else 1


def window_of(runner: Runner, config: GenerationConfig, width: int) -> int:
    """Return the positions of the widest window of a pass with a cache and drafts, on slots of ``width``; 0 without."""
    if not (config.drafts and uses_cache(config)):
        return 0
    if isinstance(config, SamplingConfig):
        return tokens_per_pass(config)
    length, _ = block_schedule(config, width)
    offset = 0 if config.block_rule == "fast_dllm" else runner.layout.config.family.prediction_offset
    return window_widths(config.cache, length, width, config.refresh_blocks, offset=offset)[0]


def rows_at_once(runner: Runner, config: GenerationConfig, width: int, wanted: int) -> int:
    """Return how many of ``wanted`` rows of this configuration to run at a time; see :meth:`Runner.batch_size`."""
    sizes = canvases_of(config), window_of(runner, config, width)
    return runner.batch_size(wanted, width, uses_cache(config), *sizes)


def memory_of(runner: Runner, config: GenerationConfig, width: int, count: int) -> Memory:
    """Estimate the memory of a device while ``count`` rows of this configuration run; see :meth:`Runner.memory`."""
    sizes = canvases_of(config), window_of(runner, config, width)
    return runner.memory(count // runner.row_shards, width, uses_cache(config), *sizes)


def runner_for(runner: Runner, config: GenerationConfig) -> Runner:
    """Return the runner for rows of this configuration: that of ``draft_axis``, or the runner itself."""
    return runner.over_data(canvases_of(config)) if divides_drafts(config) else runner


@dataclass(frozen=True)
class PoolShape:
    """The specification of a pool.

    Attributes:
      config: decoding parameters. The compiled ones hold for all rows; rows may differ in the others.
      canvas: S of the widest bucket, prompt and new tokens together; rounded up to a bucket.
      slots: maximum number of rows at a time, rounded down to a multiple of the data axis and limited by memory.
      max_steps: maximum number of denoise steps per block; None for the larger of S and the steps of ``config``.
      widths: widths of the other buckets, rounded up likewise; None chooses them automatically.
      max_programs: maximum number of buckets.
    """

    config: GenerationConfig
    canvas: int
    slots: int
    max_steps: int | None = None
    widths: tuple[int, ...] | None = None
    max_programs: int = MAX_PROGRAMS


def pool_config(runner: Runner, shape: PoolShape) -> GenerationConfig:
    """Return the decoding parameters that a pool compiles: general ones, with a number of drafts for all its slots."""
    config = generalized(with_model_blocks(shape.config, runner.layout.config))
    return with_own_drafts(config, runner.layout.spec.data, shape.slots, runner.draft is not None)


def steps_per_block(config: GenerationConfig, width: int) -> int:
    """Return the maximum number of denoise steps per block on a canvas of ``width``; 1 if autoregressive."""
    return 1 if isinstance(config, SamplingConfig) else block_schedule(config, width)[1]


def step_limit(config: GenerationConfig, width: int, wanted: int | None) -> int:
    """Return the number of denoise steps per block that slots of this width support; see :attr:`PoolShape.max_steps`.

    Raises:
      ParameterError: ``wanted`` is less than what ``config`` itself needs.
    """
    if isinstance(config, SamplingConfig):
        return 1
    length, own = block_schedule(config, width)
    if wanted is None:
        return max(width, own)
    if wanted < own:
        raise ParameterError(
            "max_steps",
            f"is {wanted}; by default a block of {length} positions has {own} steps (parallel={config.parallel}): "
            "raise max_steps, or lower steps or block_length",
        )
    return wanted


def slot_count(runner: Runner, config: GenerationConfig, width: int, wanted: int, moves: bool = True) -> int:
    """Return how many slots to create: at most ``wanted``, a multiple of the data axis, limited by memory.

    Args:
      runner: the model on its mesh.
      config: configuration of the rows, which says whether they have a cache.
      width: S, a bucket.
      wanted: requested number of slots, at least 1.
      moves: whether rows may move between buckets, which requires memory for the caches of both buckets.
    """
    runner = runner_for(runner, config)
    data, cached = runner.row_unit, uses_cache(config)
    count, room = rows_at_once(runner, config, width, max(data, wanted // data * data)), runner.room()
    while moves and cached and room is not None and count > data:
        if pool_memory(runner, config, width, count) <= room:
            break
        count -= data
    return count


def kept_bytes(runner: Runner, config: GenerationConfig, width: int, count: int) -> int:
    """Return the bytes per device that slots occupy between passes, without weights and with room for moving rows."""
    runner = runner_for(runner, config)
    memory = memory_of(runner, config, width, count)
    kept = sum(tensor.bytes for tensor in memory.resident) - runner.weight_bytes
    return MOVE_ROOM * kept if uses_cache(config) else kept


def pool_memory(runner: Runner, config: GenerationConfig, width: int, count: int) -> int:
    """Return the bytes per device that slots need in total: with weights, moving rows, and the largest pass."""
    runner = runner_for(runner, config)
    memory = memory_of(runner, config, width, count)
    peak = sum(tensor.bytes for tensor in memory.peak)
    return runner.weight_bytes + kept_bytes(runner, config, width, count) + peak


def check_pools(runner: Runner, shapes: list[PoolShape]) -> None:
    """Check that the model allows the shapes, and that the slots of all pools fit into memory together.

    Raises:
      InputError: a configuration does not match the model's objective, a canvas is longer than the model allows, or the
        pools need too much memory.
    """
    model = runner.layout.config
    for shape in shapes:
        check_kind(model, shape.config)
        if shape.canvas > model.max_positions:
            raise InputError(f"a canvas has {shape.canvas} positions; the model allows {model.max_positions}")
    room, weights = runner.room(), runner.weight_bytes
    kept, peak = 0, 0
    for shape in shapes:
        width, config = runner.bucket(shape.canvas), pool_config(runner, shape)
        count = slot_count(runner, config, width, shape.slots)
        own = kept_bytes(runner, config, width, count)
        kept += own
        peak = max(peak, pool_memory(runner, config, width, count) - weights - own)
    # Pools run one after another, so only the largest pass counts; the caches of all pools stay in memory.
    needed = weights + kept + peak
    if len(shapes) > 1 and room is not None and needed > room:
        raise InputError(
            f"the slots of {len(shapes)} modes need {needed / 1e9:.1f} GB per device, {kept / 1e9:.1f} GB of it for "
            f"caches and tokens, but {room / 1e9:.1f} GB are available; use fewer slots or modes, or a shorter canvas"
        )


def pass_cost(runner: Runner, config: GenerationConfig) -> PassCost:
    """Return the cost model of a pass, derived from the type of the devices rather than from measurements."""
    layout, spec = runner.layout, runner.layout.spec
    floor, overhead = runner.pass_floor()
    whole = PassCost(floor, overhead, unit_seconds=runner.position_seconds())
    if isinstance(config, SamplingConfig):
        if not config.use_cache:
            return whole
        read = cache_bytes_per_device(layout, spec.data, spec.sequence, runner.cache_dtype)
        per_token = max(floor, 1) * read / weight_bytes(layout, runner.dtype)
        shards = spec.data * spec.sequence
        found = replace(whole, window=tokens_per_pass(config), share=per_token, prompt_position=shards)
        return found if runner.draft is None else _with_draft_model(found, runner, runner.draft, config.draft_tokens)
    if config.cache == "none":
        return replace(whole, canvases=canvases_of(config))
    length = config.block_length or DEFAULT_BLOCK_LENGTH
    # Each block starts with a refresh over whole rows, whose cost is spread over the block's positions. An exact cache
    # needs no refresh: its window is twice as wide instead.
    share = 0.0 if config.cache == "exact" else 1 / length
    return replace(whole, window=length * canvases_of(config), share=share)


def _with_draft_model(cost: PassCost, runner: Runner, draft: Runner, tokens: int) -> PassCost:
    """Add the draft model's passes to the cost of a pass; each of them computes two positions of every row."""
    # The time of a position is proportional to the weights that compute it.
    unit = weight_bytes(draft.layout, draft.dtype) / weight_bytes(runner.layout, runner.dtype)
    return replace(cost, draft=replace(pass_cost(draft, SamplingConfig()), window=2), draft_passes=tokens * unit)


def pool_grid(
    runner: Runner,
    config: GenerationConfig,
    canvas: int,
    slots: int,
    widths: Sequence[int] | None = None,
    limit: int = MAX_PROGRAMS,
) -> Grid:
    """Choose the buckets of a pool.

    Args:
      runner: the model on its mesh.
      config: decoding parameters that are compiled.
      canvas: S of the widest bucket.
      slots: maximum number of rows at a time.
      widths: widths of the other buckets; None chooses them automatically.
      limit: maximum number of buckets.
    """
    own = None if widths is None else sorted({*map(runner.bucket, widths), canvas})
    cost, data = pass_cost(runner, config), runner_for(runner, config).row_unit
    grows = isinstance(config, SamplingConfig)
    step, unit = runner.width_step(), runner.width_unit()
    return make_grid(slots, canvas, cost, data=data, step=step, unit=unit, widths=own, limit=limit, grows=grows)
