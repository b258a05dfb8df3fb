"""Programs beside the first of each mode: what is compiled, in one order on all hosts, and when it is used.

What is in JAX's persistent cache is read before requests come. The rest is compiled while they are served: host 0 says
in its steps what is next, the most wanted first. Every host compiles that in a thread of its own, and says in each step
how far it is. A bucket is used once every host has its programs, so that no step waits for a compiler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from runtime import BackgroundCompiler, Executor, Programs, Scheduler

# What one host has compiled: a fingerprint each, or None.
Report = Sequence[str | None]
# Seconds of compilation that people are told of.
_LONG = 10.0


class Compilation:
    """What is still to be compiled on this host, and what has been on all.

    Attributes:
      remaining: buckets whose programs not every host has yet.
      is_cached: whether the last program was in the persistent cache, and so the next one may be too.
    """

    def __init__(self, executor: Executor) -> None:
        """Begin with nothing but what :meth:`runtime.Executor.warm_up` has run."""
        self._executor, self._compiler = executor, BackgroundCompiler()
        self._left = executor.later
        self._order: list[Programs] = []
        self._settled = 0
        self._usable = {number: {pool.grid.buckets[0]} for number, pool in enumerate(executor.pools)}
        self.remaining = len(self._left)
        self.is_cached = bool(self._left) and executor.cached_programs > 0

    @property
    def report(self) -> Report:
        """Fingerprints of what this host has compiled so far, in the order of all hosts; None for what failed."""
        return [one.fingerprint for one in self._compiler.done]

    def choose(self, scheduler: Scheduler) -> Programs | None:
        """What to compile next, on host 0: what rows would have used most often; None to go on with what there is."""
        if not self._left or len(self._order) > len(self._compiler.done):
            return None

        def wanted(one: Programs) -> int:
            return 0 if one.pool is None else scheduler.demand(one.pool)[one.bucket]

        # The first of several.
        chosen = max(self._left, key=wanted)
        self._left.remove(chosen)
        return chosen

    def load(self) -> None:
        """Compile the next programs and wait for them, on every host, where they may be in the persistent cache."""
        before = self._executor.cached_programs
        self.begin(self._left.pop(0)).wait()
        self.is_cached = bool(self._left) and self._executor.cached_programs > before

    def begin(self, programs: Programs) -> threading.Event:
        """Compile this next, on this host; what is returned is set when it is done."""
        self._order.append(programs)
        return self._compiler.put(str(programs), lambda: self._executor.compile(programs))

    def settle(self, reports: Sequence[Report], scheduler: Scheduler, say: Callable[[str], None]) -> None:
        """Let the scheduler use what every host has compiled, on host 0.

        Args:
          reports: of all hosts.
          scheduler: what decides which buckets are used.
          say: tells people.

        Raises:
          RuntimeError: hosts have compiled different programs.
        """
        before = self._settled
        while self._settled < min(map(len, reports)):
            programs = self._order[self._settled]
            prints = {report[self._settled] for report in reports}
            if None in prints:
                say(f"left out, since it cannot be compiled: {programs}: {self._compiler.done[self._settled].error}")
            elif len(prints) > 1:
                raise RuntimeError(f"the hosts have compiled different programs: {programs}")
            elif programs.pool is None:
                self._executor.allow_scoring(programs.bucket.width)
            else:
                self._usable[programs.pool].add(programs.bucket)
            self._settled += 1
            self.remaining -= 1
        if self._settled == before:
            return
        for pool, buckets in self._usable.items():
            scheduler.restrict(pool, buckets)
        done = self._compiler.done
        if not self.remaining and (seconds := sum(one.seconds for one in done)) > _LONG:
            names = ", ".join(f"{one.name} {one.seconds:.1f} s" for one in done)
            say(f"all programs are there; those after the first took {seconds:.0f} s: {names}")

    def restrict(self, scheduler: Scheduler) -> None:
        """Let the scheduler use nothing but what is there from the start."""
        for pool, buckets in self._usable.items():
            scheduler.restrict(pool, buckets)

    def stop(self, patience: float) -> None:
        """Compile nothing more; waits so many seconds for what is being compiled."""
        self._compiler.stop(patience)
