"""What a forward pass moves between devices: every collective, by the mesh axes it runs over.

What layers move over the tensor axis is theirs to say (:class:`runtime.models.costs.LayerCost`); the rest belongs to
the loops around them: attention over the sequence axis, the embedding, the choice of tokens, the end of a loop.
``tests/runtime/planner`` holds the bytes of each kind over each axis equal to those in the optimized HLO.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from runtime.decoding.sampling import SUMS_PER_PASS, SamplingRule, threshold_passes
from runtime.models.declarations import ModelLayout
from runtime.models.forward import residual_over_tensor
from runtime.planner.workload import Phase, Workload

_INTEGER = _FLOAT = 4
# Sums and maxima over the vocabulary that wait for one another, beside those of the thresholds.
_SERIAL_SUMS = 9
# Of a residual over tensor: the share of its scattering that schedules hide behind the product before it (after the
# MLP), and of its gathering (before the MLP), the latter where the axis is long.
_HIDDEN_SCATTER, _HIDDEN_GATHER, _LONG_AXIS = 0.4, 0.5, 8
_SLICE_LINE = 512
# Numbers that lie side by side in a register of a TPU.
_LANES = 128
# Integer digits that a sum over the vocabulary is made of.
_DIGITS = 3


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind and size.

    Attributes:
      kind: HLO's name, ``all-reduce``, ``all-gather`` or ``reduce-scatter``; ``send`` from slice to slice.
      axes: mesh axes that it runs over.
      payload: bytes of the whole array that one device ends with or, for a reduce-scatter, begins with.
      times: how often in one pass; a mean where the program decides as it runs.
      what: what is moved.
      inside_slices: among the chips of each TPU slice alone, even where the axes cross slices.
      rounds: collectives that the payload is spread over, one after another.
      hidden: share of its time that products hide.
    """

    kind: str
    axes: tuple[str, ...]
    payload: int
    times: float
    what: str
    inside_slices: bool = False
    rounds: int = 1
    hidden: float = 0.0


def choose_tokens_reductions(rule: SamplingRule, ranked: bool) -> int:
    """Numbers of 4 bytes that are reduced over the vocabulary's shards for one position.

    Args:
      rule: how tokens are chosen.
      ranked: whether their confidences are asked for too.
    """
    softmax = 1 + _DIGITS
    token = 2  # a maximum, and the lowest index that has it
    count = softmax + token
    if rule.sampled:
        count += token
    if rule.filtered:
        count += softmax + threshold_passes(rule.confidence_dtype) * SUMS_PER_PASS
    if not ranked:
        return count
    if rule.confidence == "entropy":
        count += _DIGITS
    elif rule.confidence == "topk_margin" or rule.sampled:
        count += 1
    return count


def phase_collectives(
    workload: Workload, layout: ModelLayout, platform: str, phase: Phase, slices: int = 1
) -> list[Collective]:
    """Collectives of one pass.

    Args:
      workload: what is run.
      layout: on which mesh.
      platform: compilers differ in how they bring picked positions together.
      phase: which pass.
      slices: TPU slices that the mesh lies over; what crosses them is reduced in each, padded to 512 bytes, sent.
    """
    found = _whole_rows(workload, layout, platform, phase) if phase.whole else _window(workload, layout, phase)
    if phase.name == "prefill":
        found += _last_positions(workload, layout, phase)
    elif phase.whole:
        found += _picked_positions(workload, layout, platform, phase)
    if layout.spec.tensor > 1:
        rule, ranked = workload.sampling_rule(), workload.config.objective == "masked_diffusion"
        numbers = choose_tokens_reductions(rule, ranked)
        size = phase.rows * phase.chunk // phase.head_shards(layout) * _FLOAT * numbers
        rounds = _SERIAL_SUMS + (threshold_passes(rule.confidence_dtype) if rule.filtered else 0)
        found.append(Collective("all-reduce", ("kv", "group"), size, phase.chunks, "vocabulary sums", rounds=rounds))
    return found + _whether_to_go_on(layout, platform, phase, slices)


def _over_tensor(workload: Workload, layout: ModelLayout, positions: int, divided: bool) -> list[Collective]:
    """Of the transformer over tensor: what each layer says it moves, and the embedding.

    Rows of an int8 embedding are summed as they are stored, with a scale each.

    Args:
      workload: what is run.
      layout: on which mesh.
      positions: that the device computes, of all its rows.
      divided: whether the residual lies over tensor too: a sum then leaves each device its part, and the next product
        gathers them.
    """
    if layout.spec.tensor == 1:
        return []
    numbers = positions * layout.size_per_device("embed")
    embedded = numbers + positions * _FLOAT if layout.embedding.quantized else numbers * workload.item
    found = [
        Collective(
            one.kind,
            ("kv", "group"),
            positions * one.numbers_per_position * workload.item,
            one.times * workload.config.num_layers,
            f"{one.what}, {one.times} a layer",
        )
        for one in layout.layer_cost.tensor_collectives
    ]
    found.append(Collective("all-reduce", ("kv", "group"), embedded, 1, "embedding"))
    if not divided:
        return found
    hidden = _HIDDEN_GATHER if layout.spec.tensor >= _LONG_AXIS else 0.0
    times = sum(one.times for one in found)
    gather = Collective("all-gather", ("kv", "group"), numbers * workload.item, times, "residual", hidden=hidden)
    sums = [replace(one, kind="reduce-scatter", hidden=_HIDDEN_SCATTER) for one in found if one.kind == "all-reduce"]
    return [*sums, *(one for one in found if one.kind != "all-reduce"), gather]


def _whole_rows(workload: Workload, layout: ModelLayout, platform: str, phase: Phase) -> list[Collective]:
    """Of the transformer over whole rows: what layers move over tensor, K and V gathered over sequence."""
    sequence, layers = layout.spec.sequence, workload.config.num_layers
    divided = residual_over_tensor(layout, platform, phase.rows * layout.spec.data, phase.positions)
    found = _over_tensor(workload, layout, phase.rows * phase.positions // sequence, divided)
    if sequence > 1:
        heads = layout.size_per_device("kv_heads") * layout.size_per_device("head_dim")
        size = phase.rows * phase.positions * heads * workload.item
        found.append(Collective("all-gather", ("sequence",), size, 2 * layers, "keys and values"))
    return found


def _window(workload: Workload, layout: ModelLayout, phase: Phase) -> list[Collective]:
    """Of the transformer over a few positions of each row against the cache: decoding, or a step of a block."""
    positions = phase.rows * phase.positions
    found = _over_tensor(workload, layout, positions, divided=False)
    if layout.spec.sequence > 1:
        # The cache lies over sequence: each shard attends to its own keys, then sums and maxima are reduced.
        head = layout.size_per_device("head_dim") * workload.item + 2 * _FLOAT
        partial = positions * layout.query_heads_per_device * head
        found.append(Collective("all-reduce", ("sequence",), partial, workload.config.num_layers, "partial attention"))
    return found


def _last_positions(workload: Workload, layout: ModelLayout, phase: Phase) -> list[Collective]:
    """Of a prefill: the last position of each row, which one shard of sequence has."""
    if layout.spec.sequence == 1:
        return []
    size = phase.rows * layout.size_per_device("embed") * workload.item
    return [Collective("all-reduce", ("sequence",), size, 1, "last positions")]


def _picked_positions(workload: Workload, layout: ModelLayout, platform: str, phase: Phase) -> list[Collective]:
    """Of the head on chunks of a canvas that lies over sequence."""
    if layout.spec.sequence == 1:
        return []
    positions = phase.rows * phase.chunk
    # The TPU compiler reduces the whole and cuts it where a device has one row.
    scatter = "all-reduce" if platform == "tpu" and phase.rows == 1 else "reduce-scatter"
    # It gathers by reducing where a device's part does not fill whole registers.
    partly_filled = positions // layout.spec.sequence % _LANES
    gather = "all-reduce" if platform == "tpu" and partly_filled else "all-gather"
    size = positions * layout.size_per_device("embed") * workload.item
    found = [
        Collective(scatter, ("sequence",), size, phase.chunks, "picked positions"),
        Collective(gather, ("sequence",), positions * (_INTEGER + _FLOAT), phase.chunks, "tokens, confidences"),
    ]
    if phase.name == "denoise step":
        size = phase.rows * phase.positions * _INTEGER
        found.append(Collective("all-gather", ("sequence",), size, 1, "canvas"))
    return found


# What all rows agree on in a pass, numbers and yes-or-no: whether any has work left (to refresh, or to decide by a
# refresh that it shares). How many chunks it needs is another number.
_AGREED = {"denoise step": (1, 0), "refresh": (0, 2), "block step": (0, 2), "prefill": (0, 0), "decode": (0, 1)}


def _whether_to_go_on(layout: ModelLayout, platform: str, phase: Phase, slices: int) -> list[Collective]:
    numbers, booleans = _AGREED[phase.name]
    if phase.name not in ("prefill", "decode"):
        numbers += phase.chunk < phase.positions  # a chunk of all positions is not counted
    if layout.spec.data == 1 or not numbers + booleans:
        return []
    what, boolean = "whether any row has work left", _INTEGER if platform == "tpu" else 1
    found = []
    if layout.spec.data > slices:
        inside = [(_INTEGER, numbers), (boolean, booleans)] if slices == 1 else [(_SLICE_LINE, numbers + booleans)]
        found += [
            Collective("all-reduce", ("data",), size, times, what, inside_slices=True)
            for size, times in inside
            if times
        ]
    if slices > 1:
        found.append(Collective("send", ("data",), _SLICE_LINE, numbers + booleans, what))
    return found


def bytes_by_axis(collectives: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Bytes of each kind over each tuple of mesh axes, all times counted."""
    total: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    for one in collectives:
        total[one.kind, one.axes] += one.payload * one.times
    return dict(total)
