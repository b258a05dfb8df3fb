"""Time of one pass of a compiled program: its kernels, and the part of its collectives that does not overlap.

The optimized HLO lists instructions in the order in which a device runs them. The caller provides the time of each
instruction.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from runtime.planner.hlo import KINDS, HloCollective, Instruction, Module, array_bytes, fused_slice, read_collective

# Operations that only describe values, and take no time.
_FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "while", "conditional", "call", "domain", "add-dependency",
}  # fmt: skip
_SCOPE = re.compile(r'op_name="([^"]*)"')
# A loop that runs the windows of one width: a branch, see runtime/decoding/cached_steps.py. In older programs, which
# lack the loop of the second kind, it runs refreshes, and windows are in conditionals.
_WINDOWS = re.compile(r'op_name="[^"]*/block_step/while"')
_REFRESHES = re.compile(r'op_name="[^"]*/refresh/while"')
# In programs with this scope, the loop of windows runs whole steps, one after another.
_STEPS = re.compile(r'op_name="[^"]*/block_step/while/body/following/')


@dataclass(frozen=True)
class Work:
    """The work of one run of a kernel.

    Attributes:
      seconds: time of the kernel alone on the device.
      bytes_moved: bytes read and written in device memory.
    """

    seconds: float
    bytes_moved: float = 0.0


@dataclass(frozen=True)
class Device:
    """Times of instructions on a device.

    Attributes:
      kernel: returns the work of an instruction, given the module and the instructions of its computation by name.
      collective: returns the seconds of a collective alone.
      bandwidth: bytes per second of device memory.
      launch: seconds that each kernel takes in addition to its work.
    """

    kernel: Callable[[Module, dict[str, Instruction], Instruction], Work]
    collective: Callable[[HloCollective], float]
    bandwidth: float
    launch: float = 0.0


@dataclass(frozen=True)
class Spent:
    """The time of an instruction in a pass.

    Attributes:
      name: name of the instruction.
      kind: ``kernel``, ``collective`` (the part that does not overlap with kernels), ``memory`` (waiting for copies) or
        ``launch`` (launches of all kernels of a computation).
      scope: its JAX named scopes.
      seconds: time of all its runs in the pass.
      runs: number of runs.
    """

    name: str
    kind: str
    scope: str
    seconds: float
    runs: float


@dataclass
class _Queue:
    """Transfers that overlap with kernels. Transfers in the same lane run one after another."""

    free_at: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    until: dict[str, float] = field(default_factory=dict)

    def start(self, key: str, now: float, seconds: float, lane: str = "") -> None:
        self.free_at[lane] = max(self.free_at[lane], now) + seconds
        self.until[key] = self.free_at[lane]


@dataclass(frozen=True)
class _Walk:
    """Walks over a program in execution order, and adds up the time of one pass.

    Attributes:
      module: the program.
      device: times of instructions.
      open_lengths: how many times the pass runs code inside 0, 1, 2, ... loops of unknown trip count.
      refresh: whether the pass is a refresh or a block step, if the program runs both; None if it does not.
      window_loops: whether loops run windows.
      step_loops: whether these loops run whole steps.
    """

    module: Module
    device: Device
    open_lengths: Sequence[float]
    refresh: bool | None
    window_loops: bool
    step_loops: bool

    def times(self, within: tuple[str, ...]) -> float:
        """Return how many times a pass runs the code within these loops and branches."""
        if self.refresh is not None and (within[:2] == ("loop", "loop")) != self.refresh:
            return 0.0
        if self.refresh is False and self.step_loops and "branch" not in within:
            return 0.0
        return self.open_lengths[min(within.count("loop"), len(self.open_lengths) - 1)]

    def run(self, name: str, repeats: int, within: tuple[str, ...]) -> list[Spent]:
        """Return the times of the instructions of a computation that runs ``repeats`` times."""
        instructions = self.module.computations.get(name, ())
        local = {one.name: one for one in instructions}
        often = repeats * self.times(within)
        last_of = {channel: one.name for one in instructions for channel, _ in self._fused_collectives(one)}
        links, copies, found = _Queue(), _Queue(), []
        now, moved, kernels = 0.0, 0.0, 0

        def spend(one: Instruction, kind: str, seconds: float) -> None:
            nonlocal now
            now += seconds
            if seconds and often:
                scope = _SCOPE.search(one.rest)
                found.append(Spent(one.name, kind, scope[1] if scope else "", seconds * often, often))

        for one in instructions:
            inner = self._nested(one, repeats, within)
            if inner is not None:
                found += inner
                now += sum(spent.seconds for spent in inner) / often if often else 0.0
                continue
            kind = one.operation.removesuffix("-start").removesuffix("-done")
            if one.operation.endswith("-done"):
                queue = links if one.operands[0] in links.until else copies
                wait = queue.until.get(one.operands[0], 0.0) - now
                spend(one, "collective" if queue is links else "memory", max(0.0, wait))
            elif one.operation.endswith("-start") and kind in KINDS:
                # Permutations in the two directions use different links, so they run at the same time.
                pairs = re.search(r"source_target_pairs=\{[^=]*\}\}", one.rest)
                links.start(one.name, now, self.device.collective(read_collective(one)), pairs[0] if pairs else "")
            elif one.operation.endswith("-start"):
                amount = array_bytes(one.shape) / 2
                moved += amount
                copies.start(one.name, now, amount / self.device.bandwidth)
            elif kind in KINDS:
                spend(one, "collective", self.device.collective(read_collective(one)))
            elif one.operation not in _FREE:
                fused = self._fused_collectives(one)
                for channel, collective in fused:
                    if channel not in links.until:
                        links.start(channel, now, self.device.collective(collective))
                work = self.device.kernel(self.module, local, one)
                moved += work.bytes_moved
                kernels += 1
                spend(one, "kernel", work.seconds)
                for channel, _ in fused:
                    if last_of[channel] == one.name:
                        spend(one, "collective", max(0.0, links.until[channel] - now))
        waiting = moved / self.device.bandwidth - now
        if waiting > 0 and often:
            found.append(Spent(name, "memory", "copies beside the kernels", waiting * often, often))
        if kernels and self.device.launch:
            found.append(Spent(name, "launch", "", kernels * self.device.launch * often, kernels * often))
        return found

    def _nested(self, one: Instruction, repeats: int, within: tuple[str, ...]) -> list[Spent] | None:
        """Return the times of the instructions inside a loop, a conditional or a call; None for other instructions."""
        if one.operation == "while":
            trips = self.module.trips(one)
            kind = "branch" if self.window_loops and _WINDOWS.search(one.rest) else "loop"
            inside = within if trips is not None else (*within, kind)
            count = repeats * (trips if trips is not None else 1)
            # XLA on GPU does not run the condition of a loop whose trip count it states.
            runs_condition = not self.device.launch or "known_trip_count" not in one.rest
            parts = (*([one.called["condition"]] if runs_condition else []), one.called["body"])
            return [spent for name in parts for spent in self.run(name, count, inside)]
        if one.operation == "conditional":
            sides = [self.run(name, repeats, (*within, "branch")) for name in one.branches]
            return max(sides, key=lambda side: sum(spent.seconds for spent in side))
        if one.operation == "call":
            return self.run(one.called["to_apply"], repeats, within)
        return None

    def _fused_collectives(self, one: Instruction) -> list[tuple[str, HloCollective]]:
        """Return the collectives in a fusion, with their channels. The compiler may split one into several fusions."""
        if one.operation != "fusion":
            return []
        found, name = [], one.called.get("calls", "")
        for inner in self.module.computations.get(name, ()):
            if inner.operation.removesuffix("-start") in KINDS:
                channel = re.search(r"channel_id=(\d+)", inner.rest)
                collective = read_collective(inner)
                if fused_slice(name):
                    collective = replace(collective, kind="reduce-scatter")
                found.append((channel[1] if channel else inner.name, collective))
            found += self._fused_collectives(inner)
        return found


def pass_times(module: Module, name: str, device: Device, chunks: float) -> list[Spent]:
    """Return the instructions of one pass with their times.

    Args:
      module: optimized HLO of the program that contains the pass.
      name: the pass: ``denoise step``, ``refresh``, ``block step``, ``prefill`` or ``decode``.
      device: times of instructions.
      chunks: trip count of the loop over head chunks, which is only known at run time.
    """
    # Code outside all open loops only prepares. The outer open loop is over passes, the inner one over head chunks.
    lengths = [1.0] if name == "prefill" else [0.0, 1.0, chunks]
    refresh = None
    if name in ("refresh", "block step"):
        # Inside the loop over steps, refreshes run in a loop over rows, and block steps run in a branch.
        refresh = name == "refresh"
        lengths = [0.0, 0.0, 1.0, chunks] if refresh else lengths
    loops = [one for body in module.computations.values() for one in body if one.operation == "while"]
    window_loops = any(_REFRESHES.search(one.rest) for one in loops)
    step_loops = any(_STEPS.search(one.rest) for body in module.computations.values() for one in body)
    return _Walk(module, device, lengths, refresh, window_loops, step_loops).run(module.entry, 1, ())
