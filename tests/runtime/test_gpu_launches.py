"""What a pass of a GPU program asks of the host: kernels to launch, and decisions to read from the device.

The host decides about a loop whose trip count it does not know, and about a conditional. Before each decision it waits
for the kernels before it. The tests of compiled programs are slow, and need JAX's CUDA plugin but no GPU.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from runtime.planner.hlo import Instruction, Module, read_module
from sharding.aot import aot_devices
from sharding.topology import parse_topology
from tests.runtime.test_layer_copies import FREE, GPU, gpu_options, lowered, needs_cuda

pytestmark = pytest.mark.programs

# How often loops run in a block step without a refresh, after which no row moves to another block.
BLOCK_STEP = {"/refresh/while": 0, "/block_step/while": 1, "/denoise_step/while": 0}
TWO_BLOCK_STEPS = BLOCK_STEP | {"/block_step/while": 2}


@dataclass(frozen=True)
class Launches:
    kernels: int = 0
    decisions: int = 0

    def __add__(self, other: Launches) -> Launches:
        return Launches(self.kernels + other.kernels, self.decisions + other.decisions)

    def __sub__(self, other: Launches) -> Launches:
        return self + other * -1

    def __mul__(self, times: int) -> Launches:
        return Launches(self.kernels * times, self.decisions * times)


def launches(module: Module, name: str, loops: Mapping[str, int]) -> Launches:
    """What one run of a computation launches and reads.

    Args:
      module: the program.
      name: the computation.
      loops: iterations of the loops of unknown trip count, by the end of their named scopes.
    """
    total = Launches()
    for one in module.computations[name]:
        if one.operation == "while":
            total += _loop(module, one, loops)
        elif one.operation == "conditional":
            sides = [launches(module, side, loops) for side in one.branches]
            total += Launches(0, 1) + max(sides, key=lambda side: side.kernels)
        elif one.operation == "call":
            total += launches(module, one.called["to_apply"], loops)
        elif one.operation not in FREE | {"constant"} and not one.operation.endswith("-done"):
            total += Launches(1)
    return total


def _loop(module: Module, one: Instruction, loops: Mapping[str, int]) -> Launches:
    trips, decided = module.trips(one), Launches()
    if trips is None:
        scope = re.search(r'op_name="([^"]*)"', one.rest)
        trips = next(count for end, count in loops.items() if scope and scope[1].endswith(end))
        decided = (launches(module, one.called["condition"], loops) + Launches(0, 1)) * (trips + 1)
    return decided + launches(module, one.called["body"], loops) * trips if trips else decided


def of_a_pass(text: str, loops: Mapping[str, int]) -> Launches:
    """What an iteration of the program's outer loop, over tokens or steps, launches and reads."""
    module = read_module(text)
    *_, outer = (one for one in module.computations[module.entry] if one.operation == "while")
    assert module.trips(outer) is None
    both = [launches(module, outer.called[role], loops) for role in ("condition", "body")]
    return both[0] + both[1] + Launches(0, 1)


HLO = """
HloModule step

%stop (a: (s32[], f32[8])) -> pred[] {
  %a = (s32[], f32[8]{0}) parameter(0)
  ROOT %fusion.1 = pred[] fusion(%a), kind=kLoop, calls=%fused
}

%twice (b: (s32[], f32[8])) -> (s32[], f32[8]) {
  %b = (s32[], f32[8]{0}) parameter(0)
  %first = f32[8]{0} fusion(%b), kind=kLoop, calls=%fused
  ROOT %out = (s32[], f32[8]{0}) tuple(%b, %first)
}

%side (c: f32[8]) -> f32[8] {
  %c = f32[8]{0} parameter(0)
  ROOT %copy.1 = f32[8]{0} copy(%c)
}

%step (d: (s32[], f32[8])) -> (s32[], f32[8]) {
  %d = (s32[], f32[8]{0}) parameter(0)
  %inner = (s32[], f32[8]{0}) while(%d), condition=%stop, body=%twice, metadata={op_name="jit(f)/block_step/while"}
  %none = (s32[], f32[8]{0}) while(%inner), condition=%stop, body=%twice, metadata={op_name="jit(f)/refresh/while"}
  %some = (s32[], f32[8]{0}) while(%none), condition=%stop, body=%twice, backend_config={"known_trip_count":{"n":"5"}}
  %branch = f32[8]{0} conditional(%p, %c, %c), true_computation=%side, false_computation=%side
  ROOT %out.1 = (s32[], f32[8]{0}) tuple(%d, %branch)
}

ENTRY %main (e: (s32[], f32[8])) -> (s32[], f32[8]) {
  %e = (s32[], f32[8]{0}) parameter(0)
  ROOT %outer = (s32[], f32[8]{0}) while(%e), condition=%stop, body=%step, metadata={op_name="jit(f)/while"}
}
"""


def test_kernels_and_decisions_are_counted() -> None:
    # The condition of a loop is a kernel too. The inner loop runs once, and its condition twice.
    kernels = {"outer condition": 1, "inner": 1 + 2, "none": 1, "some": 5, "branch": 1}
    decisions = {"outer": 1, "inner": 2, "none": 1, "branch": 1}
    assert of_a_pass(HLO, BLOCK_STEP) == Launches(sum(kernels.values()), sum(decisions.values()))


@functools.cache
def compiled(program: str, quantization: str, layers: int) -> str:
    """A program of the 7.6B model with this many layers."""
    sizes = GPU | {"num_layers": layers, "vocab_size": 640}
    devices = aot_devices(parse_topology("1xh200"))
    # A chunk of the head is no smaller than a window, as in the programs of the runtime.
    layout, lowering = lowered(program, devices, "bfloat16", quantization, sizes, chunk=64)
    return lowering.compile(compiler_options=gpu_options(layout)).as_text() or ""


def launched(program: str, quantization: str, layers: int) -> Launches:
    """What decoding a token launches and reads, or a block step that follows another one."""
    text = compiled(program, quantization, layers)
    if program == "decode":
        return of_a_pass(text, {})
    return of_a_pass(text, TWO_BLOCK_STEPS) - of_a_pass(text, BLOCK_STEP)


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize(("program", "layer", "others"), [("decode", 19, 21), ("block step", 17, 44)])
def test_kernels_of_a_pass(program: str, quantization: str, layer: int, others: int) -> None:
    """A layer, and everything else, launch at most this many kernels.

    From three layers on, each layer adds the same number. With two, XLA fuses the rotary table into both.
    """
    three, four = (launched(program, quantization, layers).kernels for layers in (3, 4))
    assert four - three <= layer
    assert three - 3 * (four - three) <= others


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("program", ["decode", "block step"])
def test_a_pass_has_one_decision(program: str) -> None:
    """It is whether another pass follows."""
    assert launched(program, "none", 3).decisions == 1


@needs_cuda
@pytest.mark.slow
def test_decisions_where_rows_move() -> None:
    """Before the first step of a block: whether to go on, to refresh a row, to run windows, and to move a row."""
    assert of_a_pass(compiled("block step", "none", 3), BLOCK_STEP).decisions == 4 + 1
