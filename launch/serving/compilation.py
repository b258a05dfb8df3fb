"""Background compilation of the programs that warm-up leaves out, in the same order on all hosts.

Programs in JAX's persistent cache are loaded, and run once, before the server accepts requests. The others are compiled
while requests run. Host 0 chooses the programs that rows need most often, and names them in its next step. Each host
compiles them in a background thread and reports when it has finished. The scheduler uses a bucket only when all hosts
have its programs, so no step waits for the compiler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from launch.hosts.faults import host_name
from launch.process.ending import end_at_once_if
from runtime import BackgroundCompiler, Executor, Programs, Scheduler

# The programs that one host has compiled, in order: a fingerprint for each, or None if compilation failed.
Report = Sequence[str | None]


class Compilation:
    """The programs that this host still has to compile, and the buckets that the scheduler may use.

    Attributes:
      remaining: number of buckets whose programs at least one host has not compiled yet.
      is_cached: whether the last programs came from the persistent cache, so that the next ones may be there too.
    """

    def __init__(self, executor: Executor) -> None:
        """Start with the programs that :meth:`runtime.Executor.warm_up` has compiled."""
        self._executor, self._compiler = executor, BackgroundCompiler()
        self._left = executor.later
        self._order: list[Programs] = []
        self._settled = 0
        # Number of compile tasks that list_programs has listed; None before it is called.
        self._listed: int | None = None
        self._usable = {number: {pool.grid.buckets[0]} for number, pool in enumerate(executor.pools)}
        self.remaining = len(self._left)
        self.is_cached = bool(self._left) and executor.cached_programs > 0

    @property
    def report(self) -> Report:
        """Fingerprints of the programs that this host has compiled so far. All hosts compile in the same order."""
        return [one.fingerprint for one in self._compiler.done]

    def choose(self, scheduler: Scheduler) -> Programs | None:
        """Choose the programs to compile next: those that rows would have used most often so far. Host 0 calls this.

        Returns:
          The programs; None if all are compiled or the compiler is still busy.
        """
        if not self._left or len(self._order) > len(self._compiler.done):
            return None

        def demand(one: Programs) -> int:
            return 0 if one.pool is None else scheduler.demand(one.pool)[one.bucket]

        # If several are needed equally often, max returns the first.
        chosen = max(self._left, key=demand)
        self._left.remove(chosen)
        return chosen

    def load(self) -> None:
        """Load the next programs from the persistent cache, or compile them; return when they are ready.

        All hosts call this.
        """
        before = self._executor.cached_programs
        self.begin(self._left.pop(0)).wait()
        self.is_cached = bool(self._left) and self._executor.cached_programs > before

    def run_loaded(self) -> None:
        """Run the programs that were loaded last, so that no request waits for what their first run prepares.

        All hosts call this, and only if the programs are compiled on all of them.
        """
        self._executor.run_once(self._order[-1])

    def begin(self, programs: Programs) -> threading.Event:
        """Start to compile these programs on this host. Returns an event that is set when they are compiled."""
        self._order.append(programs)
        return self._compiler.put(str(programs), lambda: self._executor.compile(programs))

    def settle(self, reports: Sequence[Report], scheduler: Scheduler, say: Callable[[str], None]) -> None:
        """Let the scheduler use the buckets whose programs all hosts have compiled. Host 0 calls this.

        Args:
          reports: the report of each host.
          scheduler: the scheduler, which chooses the bucket of each row.
          say: prints a line for the user.

        Raises:
          RuntimeError: the hosts compiled different programs.
        """
        before = self._settled
        while self._settled < min(map(len, reports)):
            programs = self._order[self._settled]
            prints = {report[self._settled] for report in reports}
            if None in prints:
                failed = [host for host, report in enumerate(reports) if report[self._settled] is None]
                names = ", ".join(host_name(host, None) for host in failed)
                why = f": {self._compiler.done[self._settled].error}" if 0 in failed else ""
                say(f"not used, because compilation failed on {names}: {programs}{why}")
            elif len(prints) > 1:
                raise RuntimeError(f"the hosts compiled different programs: {programs}")
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
        if self._listed is not None and not self.remaining and (late := self._times()[self._listed :]):
            total = sum(seconds for _, seconds in late)
            say(f"all programs are compiled; background compilation took {total:.0f} s: {_listing(late)}")

    def list_programs(self) -> str:
        """List, for the user, the programs that are compiled, with their times, and those that will be.

        Programs that this has listed are left out when :meth:`settle` reports that all are compiled.
        """
        done = self._times()
        self._listed = len(done)
        warmed_up = [(str(one), seconds) for one, seconds in self._executor.warmed_up.items()]
        said = f"compiled, or read from the compile cache: {_listing(warmed_up + done)}"
        if self._left:
            said += f"; compiled while requests are served: {', '.join(map(str, self._left))}"
        return said

    def _times(self) -> list[tuple[str, float]]:
        return [(one.name, one.seconds) for one in self._compiler.done]

    def restrict(self, scheduler: Scheduler) -> None:
        """Let the scheduler use only buckets whose programs are compiled."""
        for pool, buckets in self._usable.items():
            scheduler.restrict(pool, buckets)

    def stop(self, timeout: float) -> None:
        """Start no further compilation, and wait up to ``timeout`` seconds for the current one.

        If it takes longer, the process does not wait for it when the command ends.
        """
        self._compiler.stop(timeout)
        end_at_once_if(lambda: self._compiler.running)


def _listing(times: Sequence[tuple[str, float]]) -> str:
    """Format names and times: ``mode 0: 1 x 512 in 3.2 s, scores: 1 x 512 in 0.9 s``."""
    return ", ".join(f"{name} in {seconds:.1f} s" for name, seconds in times)
