"""Cycle counts of TPU kernels, from the final bundles that libtpu dumps during compilation.

A bundle is a very long instruction word, and a core issues one per cycle. libtpu writes the bundles of each kernel to a
text file, which also contains the loop depth of each bundle and, in the exit test of a loop, its trip count.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runtime.planner.hlo import module_name

# libtpu writes one file per kernel: DIR/<time>-<kernel>-<number>-final_bundles.txt.
_FILE = re.compile(r"^(\d+)-(.*?)-\d+-final_bundles\.txt$")
# Before the kernels of a program, it writes the program's optimized HLO.
_PROGRAM = re.compile(r"^(\d+)-TLP-hlo\.txt$")
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+((?:[A-Z]{2},?\s*)*):\s*((?:>\s*)*)\{(.*)$")
_EXIT = re.compile(r"scmp\.\w+\.[su]32\.totalorder (?:\([^)]*\), )?%(\w+), (\d+) /\* loop exit test")
_STAGE = re.compile(r"iteration index, stage = (\d+)")
_STEP = re.compile(r"%(\w+) = sadd\.s32 (?:\([^)]*\), )?(\d+), ")
# A comparison with a tile's number, and the branch that skips code on it. Such code runs only for the first or the last
# tile.
_NOT_AT = re.compile(r"%(\w+) = scmp\.ne\.s32\.totalorder %\w+, (\d+) ")
_SKIP = re.compile(r"sbr\.rel \(%(\w+)\) target")
_PRODUCT = re.compile(r"vmatmul\.(lmr\.|)(?:\w+\.)*?(bf16|f32|s8)\.(?:\w+\.)*?mxu(\d)")
# A loop that overlaps copies with work runs up to two more iterations than it has tiles, without work.
_COPY_STAGES = 2
# Rows that an instruction feeds into a matrix unit, one per cycle: all or half of the rows of a packed register.
_ROWS = {"f32": 8, "bf16": 16, "s8": 32}


def dump_options(folder: Path) -> str:
    """Return the ``LIBTPU_INIT_ARGS`` that make libtpu dump the bundles of compiled programs into a folder."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"


@dataclass
class _Loop:
    """A loop, or a whole kernel.

    Attributes:
      depth: number of loops around its bundles, itself included; 0 for a kernel.
      trips: its trip count; None if it is unknown.
      bundles: number of its own bundles that run in every iteration.
      seldom: number of its own bundles that run for a single tile, by the tile's number.
      tests: for each register with the result of a comparison, the tile's number that was compared with.
      skipping: number of the tile whose code is being read; None for code that runs for every tile.
      stages: number of stages, if the loop overlaps copies with work.
      inner: its inner loops.
      steps: increments by register.
      rows: rows that are fed into each matrix unit.
    """

    depth: int
    trips: int | None = None
    bundles: int = 0
    seldom: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    tests: dict[str, int] = field(default_factory=dict)
    skipping: int | None = None
    stages: int = 0
    inner: list[_Loop] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def read(self, marks: str, words: str) -> None:
        """Add a bundle to this loop."""
        if "PF" in marks:
            self.skipping = None
        if self.skipping is None:
            self.bundles += 1
        else:
            self.seldom[self.skipping] += 1
        self.tests |= {name: int(tile) for name, tile in _NOT_AT.findall(words)}
        if (skip := _SKIP.search(words)) and skip[1] in self.tests:
            self.skipping = self.tests[skip[1]]
        for stage in _STAGE.findall(words):
            self.stages = max(self.stages, int(stage) + 1)
        for name, step in _STEP.findall(words):
            self.steps[name] = int(step)
        for half, kind, unit in _PRODUCT.findall(words):
            self.rows[unit] += _ROWS[kind] // (2 if half else 1)
        if found := _EXIT.search(words):
            self.trips = -(-int(found[2]) // max(1, self.steps.get(found[1], 1)))

    def issued(self, tiles: int) -> tuple[int, int]:
        """Return the cycles of this loop with its inner loops, and the number of loops with unknown trip counts."""
        inside = [one.issued(tiles) for one in self.inner]
        trips = 1 if self.trips is None else self.trips
        if self.stages and trips - _COPY_STAGES <= tiles <= trips:
            trips = tiles
        elif self.stages == _COPY_STAGES:
            trips = max(1, trips - _COPY_STAGES)
        last = max(self.seldom, default=0)
        seldom = sum(bundles / ((tile or last) + 1) for tile, bundles in self.seldom.items())
        own = max(self.bundles + round(seldom), *self.rows.values(), 0)
        return trips * (own + sum(cycles for cycles, _ in inside)), (
            sum(unknown for _, unknown in inside) + (self.trips is None)
        )


@dataclass(frozen=True)
class Kernel:
    """The schedule of one kernel.

    Attributes:
      cycles: number of bundles that the kernel issues, or for each loop the cycles of its matrix units if they are
        more. A loop counts once per iteration. Branches count as taken, except those for the first or last tile.
      unknown_loops: number of loops whose trip count is not in the text; they count as one iteration.
    """

    cycles: int
    unknown_loops: int


def read_kernel(text: str, tiles: int = 0) -> Kernel:
    """Count the cycles of one kernel.

    Args:
      text: the dump of its bundles.
      tiles: number of tiles that the compiler split the work into, if known.
    """
    kernel = _Loop(0, trips=1)
    open_loops = [kernel]
    for marks, depth, words in _bundles(text):
        # Empty bundles in the delay slots of a branch are written without their depth.
        if depth or not words.startswith("}"):
            while open_loops[-1].depth > depth or (open_loops[-1].depth == depth > 0 and "LB" in marks):
                open_loops.pop()
            if "LB" in marks:
                loop = _Loop(depth)
                open_loops[-1].inner.append(loop)
                open_loops.append(loop)
        open_loops[-1].read(marks, words)
    return Kernel(*kernel.issued(tiles))


def _bundles(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield marks, depth and text of each bundle. Comments within a bundle may span several lines."""
    current: tuple[str, int, str] | None = None
    for line in text.splitlines():
        found = _BUNDLE.match(line)
        if found:
            if current:
                yield current
            current = found[1], found[2].count(">"), found[3]
        elif current:
            current = current[0], current[1], current[2] + line
    if current:
        yield current


def read_dump(folder: Path, program: str, tiles: Mapping[str, int]) -> dict[str, Kernel]:
    """Read the kernels of one program of a dump, by their names in the optimized HLO.

    Args:
      folder: folder of the dump, which may contain several programs that were compiled one after another.
      program: name of the program's HLO module. Kernels of different programs have the same names.
      tiles: tiles of each kernel, as for :func:`read_kernel`.
    """
    started: dict[int, str] = {}
    for path in folder.iterdir():
        if found := _PROGRAM.match(path.name):
            with path.open(encoding="utf-8", errors="replace") as text:
                started[int(found[1])] = module_name(text.readline())
    kernels = {}
    for path in sorted(folder.iterdir()):
        if found := _FILE.match(path.name):
            before = [time for time in started if time <= int(found[1])]
            if before and started[max(before)] == program:
                text_of_kernel = path.read_text(encoding="utf-8", errors="replace")
                kernels[found[2]] = read_kernel(text_of_kernel, tiles.get(found[2], 0))
    return kernels
