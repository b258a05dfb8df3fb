"""Parsing of optimized HLO text: which collectives it contains, their bytes and devices, and how often they run."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

# Marks transfers between slices in a TPU program.
_BETWEEN_SLICES = "xla_megascale_runtime"
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_BITS = {
    "s4": 4, "pred": 8, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s32": 32, "u32": 32, "f32": 32,
    "s64": 64, "u64": 64, "f64": 64,
}  # fmt: skip

# Operations that compute nothing: their result is an operand or a part of one, possibly elsewhere in memory or on
# another device.
_PASSED_ON = ("collective-permute", "copy", "bitcast", "get-tuple-element")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_CALLED = re.compile(r"(body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")
_OPERAND = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


@dataclass(frozen=True)
class HloCollective:
    """One collective of a program.

    Attributes:
      kind: name of the HLO operation; ``send`` for a transfer between TPU slices.
      payload: bytes of the array that one device ends with or, for a reduce-scatter, starts with. If the compiler
        combined several arrays into one collective, this is their sum.
      group: partitions of the first replica group, as indices into the mesh's devices.
      repeats: product of the trip counts of the enclosing loops whose trip count is known.
      within: the enclosing constructs that are decided at run time, outermost first: ``loop`` for a loop of unknown
        trip count, ``branch`` for a branch of a conditional.
      scope: the JAX named scopes of the operation, or of the enclosing loop if the operation has none.
    """

    kind: str
    payload: int
    group: tuple[int, ...]
    repeats: int
    within: tuple[str, ...]
    scope: str

    @property
    def open_loops(self) -> int:
        """Number of enclosing loops whose trip count is known only at run time."""
        return self.within.count("loop")

    def axes(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Return the mesh axes along which the members of the group differ.

        A transfer between slices is over ``data``, because no other axis crosses slices. If the replica groups could
        not be parsed, the result is ``("unread",)``, so that no collective is silently lost.

        Args:
          sizes: sizes of the mesh axes, in the order of the mesh.
        """
        if self.kind == "send":
            return ("data",)
        if not self.group:
            return ("unread",)
        places = np.array(np.unravel_index(self.group, tuple(sizes.values())))
        return tuple(axis for axis, row in zip(sizes, places, strict=True) if len(set(row.tolist())) > 1)


@dataclass(frozen=True)
class Instruction:
    """One instruction of optimized HLO.

    Attributes:
      name: its name, without ``%``.
      shape: shape of its result, with layout.
      operation: name of the HLO operation.
      rest: the text after the opening parenthesis of its operands.
    """

    name: str
    shape: str
    operation: str
    rest: str

    @property
    def called(self) -> dict[str, str]:
        """Computations that the instruction calls, by role; see :attr:`branches` for those of a conditional."""
        return dict(_CALLED.findall(self.rest))

    @property
    def branches(self) -> list[str]:
        """Computations that are the branches of a conditional."""
        listed = _BRANCHES.search(self.rest)
        if listed:
            return [one.strip().lstrip("%") for one in listed[1].split(",")]
        called = self.called
        return [called[role] for role in ("true_computation", "false_computation") if role in called]

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        depth, end = 1, 0
        while depth and end < len(self.rest):
            depth += (self.rest[end] in "([{") - (self.rest[end] in ")]}")
            end += 1
        return _OPERAND.findall(self.rest[:end])


@dataclass(frozen=True)
class Module:
    """An optimized HLO module.

    Attributes:
      computations: instructions of each computation in execution order, by the computation's name.
      entry: name of the entry computation.
    """

    computations: Mapping[str, Sequence[Instruction]]
    entry: str

    def trips(self, loop: Instruction) -> int | None:
        """Return the trip count of a ``while`` loop, or None if it is known only at run time.

        The count is the compiler's annotation, or follows from a counter that is compared with a constant.
        """
        condition, body = (self.computations.get(loop.called[role], ()) for role in ("condition", "body"))
        return _trips(loop, condition, body)


def read_collectives(text: str) -> list[HloCollective]:
    """Return every collective in a module's optimized HLO, with the trip counts of the loops around it.

    Two kinds of collectives appear several times in the text but run once, and are counted once: a collective that the
    compiler split into several fusions with the same channel, and an array that is gathered piece by piece for several
    matrix products.
    """
    module = read_module(text)
    found: list[HloCollective] = []
    seen: set[tuple[str, str]] = set()

    def add_windowed(windowed: HloCollective) -> None:
        # The gate and up projections gather the same array, which is counted once.
        gathered = windowed.kind, windowed.scope.rsplit("/", 2)[0]
        if windowed.kind == "reduce-scatter" or gathered not in seen:
            found.append(windowed)
        seen.add(gathered)

    def ends_loop(name: str, permute: Instruction) -> bool:
        # The compiler may move the last iteration behind the loop; it then lacks the metadata that the others have.
        source = _source(permute, {one.name: one for one in module.computations[name]})
        return source is not None and source.operation == "while" and bool(read_windowed_product(module, source))

    def walk(name: str, repeats: int, within: tuple[str, ...], scope: str = "", fused: bool = False) -> None:
        for unrolled in read_unrolled_products(module, name, repeats, within):
            add_windowed(unrolled)
        for instruction in module.computations.get(name, ()):
            kind = instruction.operation.removesuffix("-start")
            if _passes_a_piece(instruction) or (kind == "collective-permute" and ends_loop(name, instruction)):
                continue  # part of a windowed product, which is counted as a whole
            if kind in KINDS or (kind == "send" and _BETWEEN_SLICES in instruction.rest):
                channel = re.search(r"channel_id=(\d+)", instruction.rest)
                key = (kind, channel[1] if channel else instruction.name)
                if not fused or key not in seen:
                    collective = read_collective(instruction, repeats, within)
                    # One that the compiler combined from several has no scope of its own.
                    collective = replace(collective, scope=collective.scope or scope)
                    # TPUs run an all-reduce that is fused with a slice of its result as a reduce-scatter.
                    found.append(replace(collective, kind="reduce-scatter") if fused_slice(name) else collective)
                if fused:
                    seen.add(key)
                continue
            called = instruction.called
            if instruction.operation == "while":
                if windowed := read_windowed_product(module, instruction, repeats, within):
                    add_windowed(windowed)
                    continue
                trips = module.trips(instruction)
                inner = (repeats * trips, within) if trips is not None else (repeats, (*within, "loop"))
                for role in ("condition", "body"):
                    walk(called[role], *inner, scope=_scope(instruction) or scope)
                continue
            names = instruction.branches or list(called.values())
            inside = (*within, "branch") if instruction.operation == "conditional" else within
            for one in names:
                walk(one, repeats, inside, scope, fused or instruction.operation == "fusion")

    walk(module.entry, 1, ())
    return found


def fused_slice(computation: str) -> bool:
    """Return whether a fused computation is an all-reduce followed by a slice of its result."""
    return computation.startswith("all-reduce-scatter")


def read_windowed_product(
    module: Module, loop: Instruction, repeats: int = 1, within: tuple[str, ...] = ()
) -> HloCollective | None:
    """Return the collective that a windowed matrix product runs piece by piece in a loop; None for other loops.

    In such a loop (a collective matmul), each iteration multiplies one piece and passes another one around a ring.
    """
    body = loop.called["body"]
    named = re.search(r"windowed_dot_general_body_(ag|rs)", body)
    permutes = [one for one in module.computations.get(body, ()) if one.operation.startswith("collective-permute")]
    if named is None or not permutes:
        return None
    kind = {"ag": "all-gather", "rs": "reduce-scatter"}[named[1]]
    return _of_pieces(kind, permutes[0], repeats, within)


def read_unrolled_products(
    module: Module, computation: str, repeats: int = 1, within: tuple[str, ...] = ()
) -> list[HloCollective]:
    """Return the collectives of the windowed matrix products whose loops the compiler unrolled into a computation.

    What is passed around the ring tells the kinds apart: for a reduce-scatter, partial sums that the product itself
    computes; for an all-gather, parts of its operand.
    """
    instructions = module.computations.get(computation, ())
    named = {one.name: one for one in instructions}
    products: dict[str, list[Instruction]] = defaultdict(list)
    looped: set[str] = set()
    for one in instructions:
        if _passes_a_piece(one):
            products[_scope(one)].append(one)
        elif one.operation == "while" and (windowed := read_windowed_product(module, one)):
            looped.add(windowed.scope)

    def computes_pieces(scope: str, permutes: Sequence[Instruction]) -> bool:
        return any((source := _source(one, named)) is not None and _scope(source) == scope for one in permutes)

    found = []
    for scope, permutes in products.items():
        if scope not in looped:  # otherwise they are the first and the last iteration of a loop
            kind = "reduce-scatter" if computes_pieces(scope, permutes) else "all-gather"
            found.append(_of_pieces(kind, permutes[0], repeats, within))
    return found


def _source(permute: Instruction, named: Mapping[str, Instruction]) -> Instruction | None:
    """Return the instruction that computes the operand of a permutation; None if it is not in the same computation."""
    at: Instruction | None = permute
    while at is not None and (at is permute or at.operation.startswith(_PASSED_ON)):
        at = named.get(at.operands[0]) if at.operands else None
    return at


def _passes_a_piece(instruction: Instruction) -> bool:
    """Return whether an instruction passes one piece of a windowed matrix product to the next device."""
    return instruction.operation in ("collective-permute", "collective-permute-start") and (
        "dot_general" in instruction.rest
    )


def _of_pieces(kind: str, permute: Instruction, repeats: int, within: tuple[str, ...]) -> HloCollective:
    """Build the collective that a windowed product runs piece by piece, from a permutation of one piece."""
    one = read_collective(permute, repeats, within)
    following = dict(_PAIR.findall(re.sub(r"\s", "", permute.rest)))
    first = next(iter(following))
    ring = [first]
    while (last := following.get(ring[-1], first)) != first:
        ring.append(last)
    return replace(one, kind=kind, payload=one.payload * len(ring), group=tuple(sorted(map(int, ring))))


def bytes_by_axis(
    collectives: Sequence[HloCollective], sizes: Mapping[str, int], open_lengths: Sequence[float]
) -> dict[tuple[str, tuple[str, ...]], float]:
    """Sum the bytes of collectives by kind and mesh axes.

    Args:
      collectives: the collectives of a program.
      sizes: sizes of the mesh axes.
      open_lengths: how many times a collective runs that is inside 0, 1, 2, ... nested loops whose trip count the
        compiler does not state; 0 leaves it out.
    """
    total: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    for one, times in _run(collectives, open_lengths):
        total[one.kind, one.axes(sizes)] += one.payload * times
    return dict(total)


def count_by_kind(collectives: Sequence[HloCollective], open_lengths: Sequence[float]) -> dict[str, float]:
    """Count how many times collectives of each kind run; see :func:`bytes_by_axis` for the arguments."""
    total: dict[str, float] = defaultdict(float)
    for one, times in _run(collectives, open_lengths):
        total[one.kind] += times
    return dict(total)


def _run(collectives: Sequence[HloCollective], open_lengths: Sequence[float]) -> Iterator[tuple[HloCollective, float]]:
    """Yield the collectives that run at least once and on several devices, and how many times each of them runs."""
    for one in collectives:
        times = one.repeats * open_lengths[min(one.open_loops, len(open_lengths) - 1)]
        if times and len(one.group) != 1:
            yield one, times


def module_name(text: str) -> str:
    """Return the name in the first line of a program's optimized HLO; empty if there is none."""
    found = re.match(r"HloModule ([\w.\-]+)", text)
    return found[1] if found else ""


def read_module(text: str) -> Module:
    """Parse the optimized HLO of a program."""
    computations: dict[str, list[Instruction]] = {}
    current, entry = "", ""
    for line in text.splitlines():
        opened = _COMPUTATION.match(line)
        if opened and not line.startswith(" "):
            current = opened[2]
            computations[current] = []
            entry = current if opened[1] else entry
            continue
        found = _INSTRUCTION.match(line)
        if found and current:
            computations[current].append(Instruction(found[1], found[2], found[3], found[4]))
        elif current and computations[current] and line != "}":  # attributes may run over several lines
            last = computations[current][-1]
            computations[current][-1] = replace(last, rest=last.rest + line)
    return Module(computations, entry)


def _trips(loop: Instruction, condition: Sequence[Instruction], body: Sequence[Instruction]) -> int | None:
    known = re.search(r'known_trip_count[^}]*?"n":"(\d+)"', loop.rest)
    if known:
        return int(known[1])
    limits = _integers(condition)
    for one in condition:
        if one.operation == "compare" and "direction=LT" in one.rest:
            operands = one.operands
            if len(operands) == 2 and operands[1] in limits:
                return -(-limits[operands[1]] // _step(operands[0], condition, body))
    return None


def _integers(instructions: Sequence[Instruction]) -> dict[str, int]:
    """Return the values of the integer constants among instructions, by name."""
    return {
        one.name: int(one.rest.split(")")[0])
        for one in instructions
        if one.operation == "constant" and one.shape[:5] in ("s32[]", "u32[]") and one.rest.split(")")[0].isdigit()
    }


def _step(counter: str, condition: Sequence[Instruction], body: Sequence[Instruction]) -> int:
    """Return the increment of a loop's counter per iteration; it is above 1 if the compiler unrolled the loop."""
    place = next((re.search(r"index=(\d+)", one.rest) for one in condition if one.name == counter), None)
    if place is None or not body or body[-1].operation != "tuple":
        return 1
    constants, results = _integers(body), body[-1].operands
    named = {one.name: one for one in body}
    total, at = 0, results[int(place[1])] if int(place[1]) < len(results) else ""
    while at in named and named[at].operation in ("add", "copy", "bitcast"):
        operands = named[at].operands
        total += sum(constants.get(name, 0) for name in operands)
        at = next((name for name in operands if name not in constants), "")
    return max(1, total)


def read_collective(instruction: Instruction, repeats: int = 1, within: tuple[str, ...] = ()) -> HloCollective:
    """Build a collective from its instruction or, if it is asynchronous, from the instruction that starts it."""
    kind, shape = instruction.operation.removesuffix("-start"), instruction.shape
    starts = instruction.operation.endswith("-start")
    group = _first_group(instruction.rest)
    if kind == "send":
        payload = array_bytes(_top_level(shape[1:-1])[0])
    elif starts and shape.startswith("(") and kind != "all-reduce":
        # The result of an asynchronous start is a tuple of its operands and its results.
        parts = _top_level(shape[1:-1])
        payload = array_bytes(parts[1])
    else:
        payload = array_bytes(shape)
    if kind == "reduce-scatter":
        payload *= max(1, len(group))
    return HloCollective(kind, payload, group, repeats, within, _scope(instruction))


def _scope(instruction: Instruction) -> str:
    """Return the JAX named scopes of an instruction."""
    found = re.search(r'op_name="([^"]*)"', instruction.rest)
    return found[1] if found else ""


def _top_level(text: str) -> list[str]:
    """Split a text at the commas that are not inside brackets."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += letter in "([{"
        depth -= letter in ")]}"
        if letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def array_bytes(shape: str) -> int:
    """Return the total bytes of the arrays in a shape, which may be a tuple."""
    return sum(
        _BITS[kind] * math.prod(int(size) for size in sizes.split(",") if size) // 8
        for kind, sizes in _ARRAY.findall(re.sub(r"\{[^}]*\}", "", shape))
        if kind in _BITS
    )


def _first_group(rest: str) -> tuple[int, ...]:
    """Parse the first replica group, in any of the notations that HLO uses; empty if none matches."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
    if listed:
        return tuple(map(int, listed[1].split(",")))
    pairs = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", rest)
    if pairs:
        return (int(pairs[1]), int(pairs[2]))
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if iota:
        return tuple(_iota(iota[2], iota[3]).reshape(_sizes(iota[1]))[0].tolist())
    mesh = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}", rest
    )
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        flat = _iota(mesh[2], mesh[3]) if mesh[2] else np.arange(math.prod(sizes.values()))
        array = flat.reshape(tuple(sizes.values()))
        chosen = set(re.findall(r"'(\w+)'", mesh[4]))
        index: tuple[Any, ...] = tuple(slice(None) if name in chosen else 0 for name in sizes)
        return tuple(array[index].reshape(-1).tolist())
    return ()


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _iota(sizes: str, order: str | None) -> np.ndarray:
    array = np.arange(math.prod(_sizes(sizes))).reshape(_sizes(sizes))
    return array.transpose(_sizes(order)) if order else array
