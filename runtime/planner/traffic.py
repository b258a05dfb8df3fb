"""The collectives of a forward pass, with the mesh axes they run over and the bytes they move.

Each family states what its layers move over the tensor axis (:class:`runtime.models.costs.LayerCost`). This module adds
the rest: attention over the sequence axis, the embedding, the choice of tokens, and the loops' exit conditions. Tests
in ``tests/runtime/planner`` check that the bytes of each kind over each axis equal those in the optimized HLO.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import jax.numpy as jnp

from runtime.decoding.sampling import SamplingRule, ranks_probabilities
from runtime.decoding.threshold_search import bits_per_pass, threshold_candidates, threshold_passes
from runtime.models.declarations import ModelLayout
from runtime.models.forward import residual_over_tensor
from runtime.models.products import unscaled_dtype
from runtime.planner.workload import Phase, Workload
from sharding.links import Wiring

_INTEGER = _FLOAT = 4
# Number of reductions over the vocabulary that run in sequence, besides those of the threshold search.
_SERIAL_SUMS = 9
# If the residual is sharded over tensor, a part of the collectives' time overlaps with matrix products. This is the
# fraction for reduce-scatters (the one after the MLP overlaps with the product before it) and for all-gathers (the one
# before the MLP overlaps, but only if the axis has at least _LONG_AXIS devices).
_HIDDEN_SCATTER, _HIDDEN_GATHER, _LONG_AXIS = 0.4, 0.5, 8
# Transfers between slices are padded to this many bytes.
_SLICE_BYTES = 512
# Lanes of a TPU vector register: the numbers in one of its rows.
_LANES = 128
# A sum over the vocabulary consists of this many integer sums.
_DIGITS = 3


@dataclass(frozen=True)
class Collective:
    """A collective of a forward pass.

    Attributes:
      kind: name of the HLO operation: ``all-reduce``, ``all-gather`` or ``reduce-scatter``; ``send`` between slices.
      axes: mesh axes that it runs over.
      payload: bytes of the array that one device ends with or, for a reduce-scatter, starts with.
      times: how often one pass runs it; an average if this is decided at run time.
      what: a description of the data that it moves.
      inside_slices: whether it runs only among the chips of each TPU slice, even if ``axes`` cross slices.
      rounds: number of sequential collectives that share the payload.
      hidden: fraction of its time that overlaps with matrix products.
    """

    kind: str
    axes: tuple[str, ...]
    payload: int
    times: float
    what: str
    inside_slices: bool = False
    rounds: int = 1
    hidden: float = 0.0


def choose_tokens_reductions(rule: SamplingRule, ranked: bool, bits: int) -> int:
    """Return how many 4-byte numbers are reduced across the vocabulary's shards to choose one position's token.

    Args:
      rule: the sampling rule.
      ranked: whether confidences are computed too.
      bits: bits of a threshold that one pass over the vocabulary finds.
    """
    softmax = 1 + _DIGITS
    token = 2  # a maximum, and the lowest index that has it
    if ranks_probabilities(rule):
        count = softmax + token
    else:
        # The maximum of the logits is that of the softmax too, unless a token is left out. Without a confidence there
        # is no softmax.
        count = token + (_DIGITS if ranked else 0) + (1 if rule.replace_mask else 0)
    if rule.sampled:
        count += token
    if rule.filtered:
        count += softmax + 2 * threshold_candidates(rule.confidence_dtype, bits) * rule.searches + rule.top_k_first
    if not ranked:
        return count
    if rule.confidence == "entropy":
        count += _DIGITS
    elif rule.confidence == "topk_margin" or rule.sampled:
        count += 1
    return count


def phase_collectives(workload: Workload, layout: ModelLayout, wiring: Wiring, phase: Phase) -> list[Collective]:
    """Return the collectives of one pass.

    Args:
      workload: the workload.
      layout: the model's layout on the mesh.
      wiring: the mesh mapped onto chips. How the compiler shards the residual and gathers selected positions depends on
        the chips. Values that cross slices are first reduced within each slice, then padded to 512 bytes and sent.
      phase: the phase.
    """
    platform = wiring.topology.chip.platform
    found = (
        _whole_row_collectives(workload, layout, wiring, phase)
        if phase.whole
        else _window_collectives(workload, layout, phase)
    )
    if phase.name == "prefill":
        found += _last_position_collectives(workload, layout, phase)
    elif phase.whole:
        found += _picked_position_collectives(workload, layout, platform, phase)
    if phase.name == "refresh" and layout.spec.sequence > 1 and workload.decoding().drafts:
        # Drafts are guessed from the outputs around the block.
        size = workload.windows(layout, platform)[-1] * layout.size_per_device("embed") * workload.item
        found.append(Collective("all-reduce", ("sequence",), size, 1, "outputs of the block"))
    if layout.spec.tensor > 1:
        rule, ranked = workload.sampling_rule(), workload.config.objective == "masked_diffusion"
        bits = bits_per_pass(wiring.topology.chip.device_kind, layout.spec.size)
        numbers = choose_tokens_reductions(rule, ranked, bits)
        size = phase.rows * phase.chunk // phase.head_shards(layout) * _FLOAT * numbers
        rounds = _SERIAL_SUMS + threshold_passes(rule.confidence_dtype, bits) * rule.searches
        found.append(Collective("all-reduce", ("kv", "group"), size, phase.chunks, "vocabulary sums", rounds=rounds))
    # If every data shard has all rows, it knows by itself what they agree on.
    return found if workload.divides_drafts else found + _loop_conditions(layout, platform, phase, wiring.slices)


def products_in_pieces(layout: ModelLayout, wiring: Wiring, phase: Phase) -> bool:
    """Return whether the matrix products of a pass gather their operands in pieces, so that both overlap."""
    return phase.whole and layout.spec.tensor >= _LONG_AXIS and _divides_residual(layout, wiring, phase)


def _divides_residual(layout: ModelLayout, wiring: Wiring, phase: Phase) -> bool:
    """Return whether a pass over whole rows shards the residual over tensor."""
    return residual_over_tensor(layout, wiring.chips, phase.computed * layout.spec.data, phase.positions)


def _tensor_collectives(workload: Workload, layout: ModelLayout, positions: int, divided: bool) -> list[Collective]:
    """Return the transformer's collectives over the tensor axis: those of its layers and of the embedding lookup.

    Those of the layers are in ``layout.layer_cost``. Vectors of an int8 embedding are all-reduced as int8 values with
    one scale per vector, and only then converted and sharded like the residual.

    Args:
      workload: the workload.
      layout: the model's layout on the mesh.
      positions: number of positions that the device computes, over all its rows.
      divided: whether the residual is sharded over tensor. If so, each all-reduce in the residual's dtype becomes a
        reduce-scatter, and the next matrix product starts with an all-gather.
    """
    if layout.spec.tensor == 1:
        return []
    numbers = positions * layout.size_per_device("embed")
    # Partial sums of int8 weights are reduced before they are scaled.
    item = unscaled_dtype(jnp.dtype(workload.dtype)).itemsize if layout.quantization == "int8" else workload.item
    embedded = numbers + positions * _FLOAT if layout.embedding.quantized else numbers * workload.item
    found = [
        Collective(
            one.kind,
            ("kv", "group"),
            positions * one.numbers_per_position * item,
            one.times * workload.config.num_layers,
            f"{one.what}, {one.times} per layer",
        )
        for one in layout.layer_cost.tensor_collectives
    ]
    lookup = Collective("all-reduce", ("kv", "group"), embedded, 1, "embedding")
    if not divided:
        return [*found, lookup]
    times = 1 + sum(one.times for one in found)
    sums = [one for one in found if one.kind == "all-reduce"]
    others = [one for one in found if one.kind != "all-reduce"]
    (others if layout.embedding.quantized else sums).append(lookup)
    hidden = _HIDDEN_GATHER if layout.spec.tensor >= _LONG_AXIS else 0.0
    gather = Collective("all-gather", ("kv", "group"), numbers * workload.item, times, "residual", hidden=hidden)
    return [*(replace(one, kind="reduce-scatter", hidden=_HIDDEN_SCATTER) for one in sums), *others, gather]


def _whole_row_collectives(workload: Workload, layout: ModelLayout, wiring: Wiring, phase: Phase) -> list[Collective]:
    """Return the transformer's collectives in a pass over whole rows, with the all-gather of K and V over sequence."""
    sequence, layers = layout.spec.sequence, workload.config.num_layers
    rows = phase.computed
    divided = _divides_residual(layout, wiring, phase)
    found = _tensor_collectives(workload, layout, rows * phase.positions // sequence, divided)
    if sequence > 1:
        heads = layout.size_per_device("kv_heads") * layout.size_per_device("head_dim")
        size = rows * phase.positions * heads * workload.item
        found.append(Collective("all-gather", ("sequence",), size, 2 * layers, "keys and values"))
    if workload.divides_drafts and layout.spec.data > 1:
        # The canvas that a step needs, and the one that new drafts are guessed from.
        size = phase.rows * phase.positions // sequence * layout.size_per_device("embed") * workload.item
        found.append(Collective("all-reduce", ("data",), size, 2, "outputs of a canvas"))
    return found


def _window_collectives(workload: Workload, layout: ModelLayout, phase: Phase) -> list[Collective]:
    """Return the transformer's collectives in a pass over windows with a cache: a decode pass or a block step."""
    positions = phase.computed * phase.positions
    found = _tensor_collectives(workload, layout, positions, divided=False)
    if layout.spec.sequence > 1:
        # The cache is sharded over sequence. Each shard attends to its own keys; then the partial outputs and the
        # softmax's sums and maxima are reduced. With drafts, the outputs are float32 until the window's are added.
        item = _FLOAT if phase.canvases else workload.item
        head = layout.size_per_device("head_dim") * item + 2 * _FLOAT
        partial = positions * layout.query_heads_per_device * head
        found.append(Collective("all-reduce", ("sequence",), partial, workload.config.num_layers, "partial attention"))
    return found


def _last_position_collectives(workload: Workload, layout: ModelLayout, phase: Phase) -> list[Collective]:
    """Return the collective of a prefill that replicates each row's last position, which a single shard computes."""
    if layout.spec.sequence == 1:
        return []
    size = phase.rows * layout.size_per_device("embed") * workload.item
    return [Collective("all-reduce", ("sequence",), size, 1, "last positions")]


def _picked_position_collectives(
    workload: Workload, layout: ModelLayout, platform: str, phase: Phase
) -> list[Collective]:
    """Return the collectives that select positions for the head from a canvas that is sharded over sequence."""
    if layout.spec.sequence == 1:
        return []
    positions = phase.rows * phase.chunk
    # If a device has a single row, the TPU compiler uses an all-reduce and slices the result.
    scatter = "all-reduce" if platform == "tpu" and phase.rows == 1 else "reduce-scatter"
    # The TPU compiler gathers by an all-reduce if a device's part does not fill whole registers.
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


# Booleans that each pass reduces over the data axis for its loop conditions, by phase. They say whether any row has
# work left, for refreshes also whether any row still shares the current refresh, and for block steps also whether any
# row moves to another block or needs a refresh before the next step.
_AGREED = {"denoise step": 1, "refresh": 2, "block step": 2, "prefill": 0, "decode": 1}


def _loop_conditions(layout: ModelLayout, platform: str, phase: Phase, slices: int) -> list[Collective]:
    booleans = _AGREED[phase.name]
    # The number of head chunks. A chunk of all positions is not counted.
    numbers = int(phase.name not in ("prefill", "decode") and phase.chunk < phase.positions)
    if layout.spec.data == 1 or not numbers + booleans:
        return []
    what, boolean = "whether any row has work left", _INTEGER if platform == "tpu" else 1
    found = []
    if layout.spec.data > slices:
        inside = [(_INTEGER, numbers), (boolean, booleans)] if slices == 1 else [(_SLICE_BYTES, numbers + booleans)]
        found += [
            Collective("all-reduce", ("data",), size, times, what, inside_slices=True)
            for size, times in inside
            if times
        ]
    if slices > 1:
        found.append(Collective("send", ("data",), _SLICE_BYTES, numbers + booleans, what))
    return found


def bytes_by_axis(collectives: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Sum the bytes of collectives by kind and mesh axes, counting each as often as it runs."""
    total: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    for one in collectives:
        total[one.kind, one.axes] += one.payload * one.times
    return dict(total)
