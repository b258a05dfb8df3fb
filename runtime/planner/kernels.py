"""How long the kernels of a forward pass take on the matrix and vector units of a TPU, and on a GPU.

The constants of TPUs are fitted to the schedules of compiled programs that ``benchmarks/results/schedule.json`` marks
as tuned; those of GPUs to passes measured on one H200 (``benchmarks/results/gpu_passes.json``), and are assumed for
other GPUs.
"""

from __future__ import annotations

from sharding.topology import Chip

# Operations on 32-bit numbers per second: 1024 per unit and cycle. The schedules use two units per core on v4 and four
# on the others. v4 and v5p have two cores per chip. v6e was not compiled for.
_VECTOR_OPS = {"v4": 4.30e12, "v5e": 6.16e12, "v5p": 14.3e12, "v6e": 7.19e12}
_CORES = {"v4": 2, "v5p": 2}
# Rows of a register. Arrays whose second-last dimension is not a multiple are padded to one.
_SUBLANES = 8

# Fraction of peak that matrix products of many rows reach, including the operations fused into them.
_PRODUCTS = {"v4": 0.886, "v5p": 0.965}
_PRODUCTS_OF_OTHERS = 0.97
# The same if the product gathers its operand in pieces (a collective matmul).
_PRODUCTS_IN_PIECES = 0.83
# Loading a weight into the matrix units takes as long as multiplying this many rows by it.
_ROWS_TO_LOAD = 24

# On chips with two cores, the compiler divides the columns of a product into windows of this many registers, and pads
# the last one: the 37 registers of an MLP of 18944 on tensor=4 become 40.
_WINDOW, _LANES = 8, 128

# Fraction of peak of splash attention's products, and vector operations per query of a head: the kernel initialises
# running sums, and divides by them at the end.
_SPLASH_PRODUCTS, _SPLASH_OPS = 0.957, 7000

# Vector operations to unpack an int4 weight and to spread its scale, by schedules of programs for v5e.
_UNPACK_OPS = 9

# Vector operations per logit: to draw random bits, take exponentials and logarithms and find maxima, and for each
# candidate of the threshold search.
_CHOICE_OPS, _CANDIDATE_OPS = 310, 50 / 7

# On a GPU, the fraction of peak arithmetic that products of many rows reach, with the small kernels between them, and
# the fractions of the memory's bandwidth at which products of few rows read weights, by their quantization, and at
# which tokens are chosen.
GPU_PRODUCTS, GPU_CHOICE = 0.6, 0.4
GPU_WEIGHTS = {"none": 0.7, "int8": 0.47, "int4": 0.22}

# Seconds from the end of a GPU kernel to the start of the next (assumed), and kernels of a layer and of a pass of the
# threshold search, counted in programs that were compiled for H200.
LAUNCH_SECONDS = 1e-6
_KERNELS_OF_LAYER, _KERNELS_OF_SEARCH = 19, 3


def padded(positions: int) -> int:
    """Return how many positions of each row a TPU computes. Single positions of many rows share registers."""
    return positions if positions == 1 else -(-positions // _SUBLANES) * _SUBLANES


def product_seconds(chip: Chip, flops: float, peak: float, rows: int, columns: int, pieces: bool) -> float:
    """Return the seconds of the matrix products of a TPU's layers.

    Args:
      chip: type of the chip.
      flops: operations.
      peak: operations per second at peak, for the dtype in use.
      rows: positions that the device multiplies by each weight, padding included.
      columns: width of the MLP on the device.
      pieces: whether the products gather their operands in pieces.
    """
    cores, registers = _CORES.get(chip.name, 1), -(-columns // _LANES)
    share = _PRODUCTS_IN_PIECES if pieces else _PRODUCTS.get(chip.name, _PRODUCTS_OF_OTHERS)
    if cores > 1:
        share *= registers / (-(-registers // _WINDOW) * _WINDOW)
    return flops / (peak * share) * (1 + _ROWS_TO_LOAD * cores / rows)


def unpack_seconds(chip: Chip, weights: int) -> float:
    """Return the seconds that a TPU's vector units take to unpack this many int4 weights in a pass."""
    return weights * _UNPACK_OPS / _VECTOR_OPS[chip.name]


def splash_seconds(chip: Chip, flops: float, queries: float) -> float:
    """Return the seconds of splash attention's kernel.

    Args:
      chip: type of the chip.
      flops: operations of its products, with those of hidden pairs in blocks that are partly visible.
      queries: number of queries, summed over heads and layers.
    """
    return flops / (chip.flops * _SPLASH_PRODUCTS) + queries * _SPLASH_OPS / _VECTOR_OPS[chip.name]


def choice_seconds(chip: Chip, rows: int, positions: int, vocab: float, candidates: int) -> float:
    """Return the seconds that a TPU's vector units take to choose tokens.

    Args:
      chip: type of the chip.
      rows: rows on the device.
      positions: positions of each row. Single positions of several rows share registers.
      vocab: logits of a position on the device.
      candidates: candidates of the threshold search in all passes; 0 without filters.
    """
    computed = rows * padded(positions) if positions > 1 else -(-rows // _SUBLANES) * _SUBLANES
    return computed * vocab * (_CHOICE_OPS + candidates * _CANDIDATE_OPS) / _VECTOR_OPS[chip.name]


def launch_seconds(layers: int, passes: float) -> float:
    """Return the seconds between the kernels of a forward pass on a GPU.

    Args:
      layers: number of layers.
      passes: passes of the threshold search in all head chunks together.
    """
    return LAUNCH_SECONDS * (_KERNELS_OF_LAYER * layers + _KERNELS_OF_SEARCH * passes)
