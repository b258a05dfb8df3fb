"""Slots: a fixed number of rows on the mesh, which requests are inserted into and evicted from one by one.

The tokens of a row depend neither on the other slots nor on how many are taken, and shapes do not either: one program
serves a queue of any length. A row can leave its slots for others of another shape with all that it has.

Dimension letters: B slots, S canvas of a request (its prompt and its new tokens).
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from runtime.execution.programs import (
    abstract_taken_row,
    fetch,
    lower_empty_cache,
    lower_put_row,
    lower_take_row,
    lower_whole,
    put,
    put_tree,
    shapes_of,
)
from runtime.execution.row_arrays import UNLIMITED
from runtime.execution.row_request import RowRequest, RowResult
from runtime.execution.runner import Runner
from runtime.models.arrays import resized_row, row_fields, shardings
from runtime.models.kv_cache import abstract_cache


@dataclass(frozen=True)
class MovingRow:
    """A row between its slots and others: every array of it ``[1, ...]`` on the host, but for its cache.

    Attributes:
      request, state: arrays by field.
      reads_prompt: see :class:`AutoregressiveSlots`.
    """

    request: Mapping[str, np.ndarray]
    state: Mapping[str, np.ndarray]
    reads_prompt: bool = True


# What may be put into a slot; None for nothing.
Row = RowRequest | MovingRow | None


class Slots(abc.ABC):
    """A fixed number of rows on the mesh, each free or taken by a request. Nothing is there before the first insertion.

    Attributes:
      count: B.
      width: S at most, a bucket.
      forwards: forward passes so far.
      prefill_seconds: wall time so far of those that have read prompts in chunks.
      iterations: those of them that every taken slot took part in: all but the prefills of inserted rows.
      request: run-time arguments of all slots, on the mesh.
      state: the loop's state of all slots, on the mesh.
    """

    request: Any = None
    state: Any = None

    def __init__(self, runner: Runner, width: int, count: int, cached: bool) -> None:
        """Make free slots."""
        self._runner, self.width, self.count, self._cached = runner, width, count, cached
        self.forwards = self.iterations = 0
        self.prefill_seconds = 0.0
        self._limits: dict[int | None, jax.Array] = {}

    @abc.abstractmethod
    def _row(self, request: RowRequest | None) -> tuple[Any, Any]:
        """Request and state of one row on the host, every array ``[1, ...]``; None for an empty slot."""

    @abc.abstractmethod
    def run(
        self, max_iterations: int | None = None, step_limit: int | None = None, chunks: int | None = None
    ) -> np.ndarray:
        """Read prompts, then run iterations until every slot is done, or a limit is reached.

        Args:
          max_iterations: None for no limit.
          step_limit: no row begins this step of its own, or a later one (diffusion); None for no limit.
          chunks: of prompts, for each shard of ``data``, that are read at most (autoregressive); None for all.

        Returns:
          Which slots are done, bool ``[B]``; empty ones are.
        """

    @property
    def unread(self) -> list[int]:
        """Slots whose prompts are not read to their end: they have no new tokens yet."""
        return []

    @abc.abstractmethod
    def canvas(self) -> np.ndarray:
        """The tokens in the slots now: int32 ``[B, S]``, -1 where nothing is committed or generated yet."""

    @abc.abstractmethod
    def collect(self, taken: Mapping[int, tuple[int, RowRequest]], ended_early: bool = False) -> list[RowResult]:
        """Results of slots: slot to the number of its request, and the request. Evicts nothing.

        Args:
          taken: the slots.
          ended_early: the rows are done as they are: padding takes the place of their masks.
        """

    @abc.abstractmethod
    def compile(self) -> None:
        """Compile what :meth:`run` and insertions of single rows run, without any row, from any thread."""

    # ---- rows that come and go --------------------------------------------------------------------------------

    def insert(self, rows: Mapping[int, Row]) -> None:
        """Insert rows, by slot; None evicts whatever a slot holds.

        All but caches passes through the host, so that no program is needed for it.
        """
        free = self._row(None)
        if self.request is None:
            parts = [_repeated(row_fields(tree), self.count) for tree in free]
            cache = self._empty_cache() if self._cached else None
        else:
            parts = self._fetch_rows()
            free, cache = (self.request, self.state), self.state.cache
        for slot, row in rows.items():
            for part, own in zip(parts, self._fields(row), strict=True):
                for name, values in own.items():
                    part[name][slot] = values[0]
        request, state = (replace(tree, **part) for tree, part in zip(free, parts, strict=True))
        self.request = put_tree(self._runner.layout, request)
        self.state = replace(put_tree(self._runner.layout, replace(state, cache=None)), cache=cache)

    def _fields(self, row: Row) -> tuple[Mapping[str, np.ndarray], ...]:
        """Request and state of a row in the sizes of these slots."""
        if not isinstance(row, MovingRow):
            return tuple(row_fields(tree) for tree in self._row(row))
        like = (row_fields(tree) for tree in self._row(None))
        return tuple(resized_row(own, there) for own, there in zip((row.request, row.state), like, strict=True))

    def _fetch_rows(self) -> list[dict[str, np.ndarray]]:
        """Request and state of all slots on the host, ``[B, ...]`` by field, to be written into."""
        trees = [row_fields(self.request), row_fields(self.state)]
        if jax.process_count() > 1:
            key, arguments = ("whole", type(self)), (trees,)
            trees = self._compiled(key, arguments, lambda: lower_whole(self._runner.layout, trees))(trees)
        found: list[dict[str, np.ndarray]] = jax.tree.map(np.array, jax.device_get(trees))
        return found

    def take(self, slots: Sequence[int]) -> dict[int, MovingRow]:
        """What other slots need of some rows beside their caches. They stay where they are until they are evicted."""
        request, state = self._fetch_rows()

        def row(part: Mapping[str, np.ndarray], slot: int) -> dict[str, np.ndarray]:
            return {name: values[slot : slot + 1] for name, values in part.items()}

        return {slot: MovingRow(row(request, slot), row(state, slot)) for slot in slots}

    def take_cache(self, slot: int, length: int) -> jax.Array | None:
        """A copy of a row's cache for slots up to ``length`` positions wide; None where rows have none."""
        if self.state.cache is None:
            return None
        arguments = (self.state.cache, self._number(slot))
        return self._taking(length, arguments)(*arguments)

    def put_cache(self, slot: int, taken: jax.Array | None) -> None:
        """Give a row that has moved here the cache that was taken; None where rows have none."""
        if taken is None:
            return
        arguments = (self.state.cache, self._number(slot), taken)
        self.state = replace(self.state, cache=self._putting(arguments)(*arguments))

    # ---- programs ---------------------------------------------------------------------------------------------

    def _compiled(
        self, key: Hashable, arguments: tuple[Any, ...], lower: Callable[[], jax.stages.Lowered]
    ) -> jax.stages.Compiled:
        """A program; one that is not for arrays that are there is only prepared."""
        programs, key = self._runner.programs, (key, shapes_of(arguments))
        there = all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(arguments))
        return programs.get(key, lower) if there else programs.prepare(key, lower)

    def _taking(self, length: int, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        layout = self._runner.layout
        return self._compiled(("take", length), arguments, lambda: lower_take_row(layout, length, *arguments))

    def _putting(self, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        return self._compiled("put", arguments, lambda: lower_put_row(self._runner.layout, *arguments))

    def _empty_cache(self) -> Any:
        return self._emptying()()

    def _emptying(self) -> jax.stages.Compiled:
        runner, shape = self._runner, (self.count, self.width)
        key = ("empty", *shape)
        # It fills memory and computes nothing, which is no program to those who count them.
        lower = functools.partial(lower_empty_cache, runner.layout, *shape, runner.cache_dtype)
        return runner.programs.prepare(key, lower, counts=False)

    def compile_moves(self, length: int) -> None:
        """Compile what moves rows between these slots and others up to ``length`` positions wide, from any thread."""
        request, state = self._abstract()
        if jax.process_count() > 1:
            trees = [row_fields(request), row_fields(state)]
            self._compiled(("whole", type(self)), (trees,), lambda: lower_whole(self._runner.layout, trees))
        if self._cached:
            layout, number = self._runner.layout, jax.ShapeDtypeStruct((), np.int32, sharding=self._everywhere)
            taken = abstract_taken_row(layout, length, self._runner.cache_dtype)
            self._emptying()
            self._taking(length, (state.cache, number))
            self._putting((state.cache, number, taken))

    def _abstract(self) -> tuple[Any, Any]:
        """Request and state of all slots as ``ShapeDtypeStruct``."""
        layout, found = self._runner.layout, []
        for tree in self._row(None):
            fields = {
                name: np.broadcast_to(values, (self.count, *values.shape[1:]))
                for name, values in row_fields(tree).items()
            }
            whole = replace(tree, **fields)
            describe = lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)  # noqa: E731
            found.append(jax.tree.map(describe, whole, shardings(layout, whole)))
        request, state = found
        if self._cached:
            state = replace(state, cache=abstract_cache(layout, self.count, self.width, self._runner.cache_dtype))
        return request, state

    @property
    def _everywhere(self) -> jax.sharding.NamedSharding:
        return self._runner.layout.replicated

    def _number(self, value: int) -> jax.Array:
        return put(np.int32(value), self._everywhere)

    def _limit(self, value: int | None) -> jax.Array:
        """A limit on the devices. Requests are not donated, so that one array serves every run that it limits."""
        if value not in self._limits:
            self._limits[value] = self._number(int(UNLIMITED) if value is None else value)
        return self._limits[value]

    def _log_probabilities(self) -> np.ndarray | None:
        kept = self.state.log_probabilities
        return None if kept is None else fetch(kept)


def _repeated(fields: Mapping[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    return {name: np.repeat(values, count, axis=0) for name, values in fields.items()}
