"""Slots: a fixed number of rows on the mesh, into which requests are inserted and from which they are evicted.

Shapes do not depend on how many slots are occupied, so one program serves a queue of any length. The tokens of a row do
not depend on the other slots. A row can move to slots of another shape, with its state and its cache.

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

from runtime.execution.cache_programs import (
    abstract_taken_row,
    lower_empty_cache,
    lower_put_row,
    lower_take_row,
)
from runtime.execution.programs import lower_replicate, put, put_tree, shapes_of
from runtime.execution.result import DraftStats
from runtime.execution.row_arrays import UNLIMITED
from runtime.execution.row_request import RowRequest, RowResult
from runtime.execution.runner import Runner
from runtime.models.arrays import only_row_fields, resized_row, row_fields


@dataclass(frozen=True)
class MovingRow:
    """A row on its way to other slots: all of its arrays ``[1, ...]`` on the host, except for its cache.

    Attributes:
      request, state: the row's run-time arguments and loop state; fields that are not arrays of rows are None.
      reads_prompt: whether the row's own prefill is counted in its computed positions (autoregressive). It is False for
        a row that shared the prefill of another row with the same prompt.
    """

    request: Any
    state: Any
    reads_prompt: bool = True


# Values that can be inserted into a slot; None evicts the slot's row.
Row = RowRequest | MovingRow | None


class Slots(abc.ABC):
    """A fixed number of slots on the mesh. Their arrays are created by the first insertion.

    Attributes:
      count: B, number of slots.
      width: maximum of S, a bucket.
      forwards: number of forward passes so far.
      prefill_seconds: wall time so far of reading prompts in chunks.
      iterations: number of loop iterations so far. Prefills of inserted rows are not included.
      copied: positions of a copy of a row's cache, for moves; by default ``width``.
      request: run-time arguments of all slots, on the mesh; None before the first insertion.
      state: loop state of all slots, on the mesh; None before the first insertion.
    """

    request: Any = None
    state: Any = None

    def __init__(self, runner: Runner, width: int, count: int, cached: bool) -> None:
        """Create ``count`` free slots for rows of up to ``width`` positions, with a KV cache if ``cached``."""
        self._runner, self.width, self.count, self._cached = runner, width, count, cached
        self.forwards = self.iterations = 0
        self.copied = width
        self.prefill_seconds = 0.0
        self._limits: dict[int | None, jax.Array] = {}
        # Request and state of the last gather, and what it returned.
        self._gathered: tuple[Any, Any, tuple[Any, Any]] | None = None

    @abc.abstractmethod
    def _row(self, request: RowRequest | None) -> tuple[Any, Any]:
        """Return request and state of one row on the host, every array ``[1, ...]``; None stands for an empty slot."""

    @abc.abstractmethod
    def _abstract(self) -> tuple[Any, Any]:
        """Return request and state of all slots as ``ShapeDtypeStruct``."""

    @abc.abstractmethod
    def run(
        self,
        max_iterations: int | None = None,
        step_limit: int | None = None,
        chunks: int | None = None,
        min_running: int = 1,
    ) -> np.ndarray:
        """Read prompts into the cache, then run iterations until every slot is done or a limit is reached.

        Args:
          max_iterations: maximum number of iterations; None for no limit.
          step_limit: no row starts its step of this number or a later one (diffusion); None for no limit.
          chunks: maximum number of prompt chunks that each ``data`` shard reads (autoregressive); None for no limit.
          min_running: stop when fewer rows than this are running. With the number of occupied slots, the run ends in
            the iteration in which one of their rows does. Rows whose prompts are not completely read count as running.
            Where rows end with their prompt, one iteration runs, so that the others advance whatever comes and goes.

        Returns:
          bool ``[B]``, the slots that are done; empty slots are done.
        """

    @property
    def unread(self) -> list[int]:
        """Slots whose prompts are not completely read. Their rows have no new tokens yet."""
        return []

    def non_finite(self) -> np.ndarray:
        """Return the slots whose rows have ended because the model's logits were not finite: bool ``[B]``."""
        _, state = self.whole()
        return np.asarray(state.non_finite)

    @abc.abstractmethod
    def draft_stats(self) -> dict[int, DraftStats]:
        """Return the passes and accepted steps of each slot's row so far; empty without drafts."""

    @abc.abstractmethod
    def canvas(self) -> np.ndarray:
        """Return the current tokens of the slots, int32 ``[B, S]``, with -1 at positions that have no token yet."""

    @abc.abstractmethod
    def collect(self, taken: Mapping[int, tuple[int, RowRequest]], ended_early: bool = False) -> list[RowResult]:
        """Return the results of rows, without evicting them.

        Args:
          taken: for each slot, the number of its request, and the request.
          ended_early: the rows end as they are, and padding replaces their masks.
        """

    @abc.abstractmethod
    def compile(self) -> None:
        """Compile the programs of :meth:`run` and of insertions of single rows. May be called from any thread."""

    # ---- rows that come and go --------------------------------------------------------------------------------

    def insert(self, rows: Mapping[int, Row]) -> None:
        """Insert rows into slots; None evicts the row of a slot. For rows that moved, :meth:`put_caches` follows.

        All arrays except caches go through the host, so no compiled program is needed.
        """
        if self.request is None:
            free = self._row(None)
            parts = jax.tree.map(lambda values: np.repeat(values, self.count, axis=0), _only_rows(free))
            caches = {name: self._empty_program(name, own)() for name, own in self._caches.items()}
        else:
            parts = self._fetch_rows()
            free, caches = (self.request, self.state), {name: getattr(self.state, name) for name in self._caches}
        # Masked positions have weight 0 in attention, but 0 times NaN is NaN, so NaN in the cache of the old row would
        # spread to the new one. Whether a prompt left any is known only when it is read completely. The cache of a row
        # that moves here replaces all of the old one, which may be of a row that moves away, and is copied later.
        unread = self.unread if self._cached and self.request is not None else []
        new = [slot for slot, row in rows.items() if self._cached and not isinstance(row, MovingRow)]
        to_clear = [slot for slot in new if parts[1].non_finite[slot] or slot in unread]
        for slot, row in rows.items():
            for values, own in zip(jax.tree.leaves(parts), jax.tree.leaves(self._row_arrays(row)), strict=True):
                values[slot] = own[0]
        request, state = (replace(tree, **row_fields(part)) for tree, part in zip(free, parts, strict=True))
        self.request = put_tree(self._runner.layout, request)
        without = replace(state, **dict.fromkeys(caches))
        self.state = replace(put_tree(self._runner.layout, without), **caches)
        for slot in to_clear:
            self._clear_cache(slot)

    def _clear_cache(self, slot: int) -> None:
        shapes = {
            name: abstract_taken_row(own.layout, self.copied, own.cache_dtype) for name, own in self._caches.items()
        }
        self.put_caches(slot, {name: put(np.zeros(one.shape, one.dtype), one.sharding) for name, one in shapes.items()})

    def _row_arrays(self, row: Row) -> tuple[Any, Any]:
        """Return request and state of a row, resized to these slots; see :class:`MovingRow`."""
        if isinstance(row, MovingRow):
            return resized_row((row.request, row.state), _only_rows(self._row(None)))
        return _only_rows(self._row(row))

    def _fetch_rows(self) -> tuple[Any, Any]:
        """Copy request and state of all slots to the host as writable arrays ``[B, ...]``."""
        found: tuple[Any, Any] = jax.tree.map(np.array, jax.device_get(_only_rows(self.whole())))
        return found

    def whole(self) -> tuple[Any, Any]:
        """Return request and state, whose arrays of rows ``[B, ...]`` this host can read.

        With several processes, a program gathers these arrays, once after each change, and all other fields are None.
        :meth:`compile_moves` compiles it, so that no row waits for the compiler. All processes must call this equally
        often.
        """
        if jax.process_count() == 1:
            return self.request, self.state
        last = self._gathered
        if last is None or last[0] is not self.request or last[1] is not self.state:
            trees = _only_rows((self.request, self.state))
            last = self._gathered = self.request, self.state, self._whole_program(trees)(trees)
        return last[2]

    def take(self, slots: Sequence[int]) -> dict[int, MovingRow]:
        """Copy rows, without their caches, to move them to other slots. The rows stay here until they are evicted."""
        trees = self._fetch_rows()

        def row(slot: int) -> tuple[Any, Any]:
            found: tuple[Any, Any] = jax.tree.map(lambda values: values[slot : slot + 1], trees)
            return found

        return {slot: MovingRow(*row(slot)) for slot in slots}

    @property
    def _caches(self) -> dict[str, Runner]:
        """The caches of the slots: for each one's name in the state, the model that it belongs to."""
        return {"cache": self._runner} if self._cached else {}

    def take_caches(self, slot: int) -> dict[str, jax.Array]:
        """Copy a row's caches, padded to :attr:`copied` positions, by their names; empty if rows have no cache."""
        taken = {}
        for name, own in self._caches.items():
            arguments = (getattr(self.state, name), self._device_scalar(slot))
            taken[name] = self._take_program(name, own, arguments)(*arguments)
        return taken

    def put_caches(self, slot: int, taken: Mapping[str, jax.Array]) -> None:
        """Set the caches of a row that has moved here to copies from :meth:`take_caches`."""
        for name, own in self._caches.items():
            arguments = (getattr(self.state, name), self._device_scalar(slot), taken[name])
            self.state = replace(self.state, **{name: self._put_program(name, own, arguments)(*arguments)})

    # ---- programs ---------------------------------------------------------------------------------------------

    def _compiled(
        self, key: Hashable, arguments: tuple[Any, ...], lower: Callable[[], jax.stages.Lowered]
    ) -> jax.stages.Compiled:
        """Return the compiled program for these arguments.

        With abstract arguments, it is compiled in advance, so :attr:`ProgramCache.before_run` is not called.
        """
        programs, key = self._runner.programs, (key, shapes_of(arguments))
        there = all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(arguments))
        return programs.get(key, lower) if there else programs.prepare(key, lower)

    def _whole_program(self, trees: tuple[Any, Any]) -> jax.stages.Compiled:
        layout = self._runner.layout
        # With ``draft_axis=data``, arrays of the same shapes lie on other devices.
        key = ("whole", type(self), layout.rules)
        return self._compiled(key, (trees,), lambda: lower_replicate(layout, trees))

    def _take_program(self, name: str, own: Runner, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        lower = functools.partial(lower_take_row, own.layout, self.copied, *arguments)
        return self._compiled(("take", name, self.copied), arguments, lower)

    def _put_program(self, name: str, own: Runner, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        return self._compiled(("put", name), arguments, functools.partial(lower_put_row, own.layout, *arguments))

    def _empty_program(self, name: str, own: Runner) -> jax.stages.Compiled:
        key = ("empty", name, self.count, self.width)
        # This program only fills memory, so it is not counted among the compiled programs.
        lower = functools.partial(lower_empty_cache, own.layout, self.count, self.width, own.cache_dtype)
        return self._runner.programs.prepare(key, lower, counts=False)

    def compile_moves(self) -> None:
        """Compile the programs that move rows to and from these slots. One of them also clears a cache.

        May be called from any thread.
        """
        request, state = self._abstract()
        if jax.process_count() > 1:
            self._whole_program(_only_rows((request, state)))
        number = jax.ShapeDtypeStruct((), np.int32, sharding=self._replicated)
        for name, own in self._caches.items():
            taken = abstract_taken_row(own.layout, self.copied, own.cache_dtype)
            self._empty_program(name, own)
            self._take_program(name, own, (getattr(state, name), number))
            self._put_program(name, own, (getattr(state, name), number, taken))

    @property
    def _own_cache_dtype(self) -> Any:
        """Dtype of the slots' cache; None without a cache."""
        return self._runner.cache_dtype if self._cached else None

    @property
    def _replicated(self) -> jax.sharding.NamedSharding:
        return self._runner.layout.replicated

    def _device_scalar(self, value: int) -> jax.Array:
        return put(np.int32(value), self._replicated)

    def _limit(self, value: int | None) -> jax.Array:
        """Return a limit as an array on the devices. It is reused between runs, because requests are not donated."""
        if value not in self._limits:
            self._limits[value] = self._device_scalar(UNLIMITED if value is None else value)
        return self._limits[value]

    def _log_probabilities(self) -> np.ndarray | None:
        kept = self.whole()[1].log_probabilities
        return None if kept is None else np.asarray(kept)


def _only_rows(trees: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return a request and a state that keep only the arrays with one entry per row."""
    request, state = trees
    return only_row_fields(request), only_row_fields(state)
