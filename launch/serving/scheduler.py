"""Who gets which slot when. One thread owns the engine; requests reach it through a bounded queue.

Each turn: what nobody wants any more goes, what waits enters free slots, everything in a slot goes on by a few
iterations, and what is done or newly certain is posted. All hosts do the same turn.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np

from launch.serving.errors import ENGINE_FAILED, ApiError, busy, too_late, unavailable
from launch.serving.jobs import Job, Ticket
from launch.serving.mesh import Mesh, Outcome, PoolOutcome, PoolTurn, Turn
from launch.serving.metrics import Metrics
from launch.serving.waiting import Waiting
from runtime.decoding.parameters import DiffusionConfig

State = Literal["warming up", "ready", "draining", "dead"]

_IDLE_SECONDS = 0.25  # between two turns of nothing
_LOOK_SECONDS = 0.03  # that a turn takes, about
_MOST_ITERATIONS = 16
_ASK_SECONDS = 0.5  # between two questions whether to end
_PREFILLS = 2  # rows for each shard of data that start in a turn of an autoregressive model
_RATES = 64  # rows over which the rate of service is measured
_LONGEST_RETRY = 60


class Hosts(Protocol):
    """What the scheduler needs of :class:`launch.hosts.host.Host`."""

    number: int
    count: int

    def mark(self) -> None:
        """Note progress."""

    def gather(self, topic: str, value: object) -> list[object]:
        """What each host says."""

    def draining(self) -> bool:
        """Whether to end."""

    def before_end(self, tell: Callable[[], None]) -> None:
        """What to do before a fault of any host ends this process."""


def agree(hosts: Hosts, turn: Turn | None) -> Turn:
    """The turn that host 0 has decided, on all hosts; the others say None."""
    hosts.mark()
    if hosts.count == 1:
        assert turn is not None
        return turn
    said = hosts.gather("turn", None if turn is None else turn.to_json())[0]
    return turn or Turn.from_json(said)  # type: ignore[arg-type]


def follow(mesh: Mesh, hosts: Hosts) -> None:
    """Do what host 0 decides, until it says that this is the end."""
    if not mesh.warm_up(hosts.draining):
        return
    while True:
        turn = agree(hosts, None)
        mesh.turn(turn)
        if turn.ask:
            hosts.draining()
        if turn.end:
            return


class Scheduler:
    """Requests on one side, the mesh on the other.

    Attributes:
      state: what the server is doing.
      mesh: the slots.
      metrics: what is counted.
      cut_short: requests that the grace was too short for.
    """

    def __init__(self, hosts: Hosts, metrics: Metrics, max_queue: int, grace: float) -> None:
        """Take jobs once :meth:`run` runs.

        Args:
          hosts: this host among all.
          metrics: where to count.
          max_queue: rows that may wait.
          grace: seconds to finish what is there when the server is told to end.
        """
        self.state: State = "warming up"
        self.mesh: Mesh | None = None
        self.metrics = metrics
        self._hosts, self._max_queue, self._grace = hosts, max_queue, grace
        self._lock = threading.Condition()
        self._rows: list[Waiting[Ticket]] = []
        self._scorings: Waiting[Ticket] = Waiting()
        self._jobs: set[Job] = set()
        self._flying: dict[int, Ticket] = {}
        self._numbers = itertools.count()
        self._waiting = 0
        self._changed = False
        self._served: deque[float] = deque(maxlen=_RATES)
        self._seconds: list[float] = []  # of an iteration, by pool
        self._scored: Ticket | None = None
        self._beat = time.monotonic()
        self._asked = 0.0
        self._end_by: float | None = None
        self.cut_short = 0
        metrics.watch("num_requests_running", "Rows in slots.", lambda: len(self._flying))
        metrics.watch("num_requests_waiting", "Rows and scorings that wait.", lambda: self._waiting)
        metrics.watch("kv_cache_usage_perc", "Share of the slots that are taken, 1 for all.", self._usage)
        metrics.watch("programs_compiled", "Programs compiled since the start.", self._programs)

    # ---- the server's side: any thread ------------------------------------------------------------------------

    def check_room(self) -> None:
        """Check that a request has a chance, before it is read.

        Raises:
          ApiError: not ready, or the queue is full.
        """
        if self.state != "ready":
            self.metrics.refused(self.state)
            raise ENGINE_FAILED if self.state == "dead" else unavailable(f"the server is {self.state}")
        if self._waiting >= self._max_queue:
            self.metrics.refused("queue full")
            raise busy(self._retry_after())

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
          ApiError: not ready, or it does not fit the queue.
        """
        with self._lock:
            self.check_room()
            if self._waiting + job.left > self._max_queue:
                self.metrics.refused("queue full")
                raise busy(self._retry_after())
            for index in range(len(job.rows)):
                self._rows[job.pool].add(job.owner, Ticket(job, index))
            for index in range(len(job.scorings)):
                self._scorings.add(job.owner, Ticket(job, index))
            self._waiting += job.left
            self._jobs.add(job)
            self._lock.notify()

    def cancel(self, job: Job) -> None:
        """Nobody wants the answer any more. What is done already is not undone."""
        with self._lock:
            if job in self._jobs:
                self.metrics.given_up("cancelled")
                self._give_up(job)
            self._lock.notify()

    def healthy(self, patience: float) -> bool:
        """Whether the engine's thread lives and has not been busy with one turn for more than ``patience`` seconds."""
        return self.state in ("ready", "draining") and time.monotonic() - self._beat < patience

    def fail(self, error: ApiError) -> None:
        """Answer everybody who waits with an error."""
        with self._lock:
            for job in list(self._jobs):
                self._give_up(job)
                job.mail.post(error=error)

    def _give_up(self, job: Job) -> None:
        job.gone = self._changed = True
        self._jobs.discard(job)

    def _retry_after(self) -> int:
        """Seconds in which half the queue will have been served, as things go."""
        served = list(self._served)
        if len(served) < 2 or served[-1] <= served[0]:
            return 1
        seconds = self._waiting / 2 * (served[-1] - served[0]) / (len(served) - 1)
        return max(1, min(_LONGEST_RETRY, round(seconds)))

    def _usage(self) -> float:
        slots = sum(pool.count for pool in self.mesh.pools) if self.mesh else 0
        return len(self._flying) / slots if slots else 0.0

    def _programs(self) -> float:
        return self.mesh.engine.compiled_programs if self.mesh else 0

    # ---- the mesh's side: the thread that owns the engine -----------------------------------------------------

    def run(self, mesh: Mesh, alive: Callable[[], bool], ready: Callable[[], None]) -> None:
        """Warm up, and serve until the server is told to end and is done; told before, it ends without.

        Args:
          mesh: the slots.
          alive: whether there is still anybody to serve.
          ready: called when requests are taken.
        """
        try:
            if not mesh.warm_up(self._hosts.draining):
                self.state = "draining"
                return
            self._rows = [Waiting() for _ in mesh.pools]
            self._seconds = [0.0] * len(mesh.pools)
            self.mesh = mesh
            self._beat = time.monotonic()
            self.state = "ready"
            ready()
            while True:
                turn = self._decide(mesh)
                agree(self._hosts, turn)
                self._deliver(mesh.turn(turn))
                self._beat = time.monotonic()
                if turn.ask:
                    self._ask()
                if turn.end:
                    return
                if not alive():
                    raise RuntimeError("the HTTP server has ended by itself")
        except BaseException:
            self.state = "dead"
            self.fail(ENGINE_FAILED)
            raise

    def _ask(self) -> None:
        self._asked = time.monotonic()
        if self._hosts.draining() and self._end_by is None:
            self.state = "draining"
            self._end_by = time.monotonic() + self._grace

    def _decide(self, mesh: Mesh) -> Turn:
        with self._lock:
            if not (self._waiting or self._flying or self._changed):
                self._lock.wait(_IDLE_SECONDS)
            now = time.monotonic()
            for job in [job for job in self._jobs if job.deadline <= now]:
                self.metrics.given_up("deadline")
                self._give_up(job)
                job.mail.post(error=too_late(job.deadline - job.arrived))
            if self._end_by is not None and now > self._end_by and self._jobs:
                self.cut_short = len(self._jobs)
                self.fail(unavailable("the server is shutting down"))
            ask = now - self._asked >= _ASK_SECONDS
            if self._end_by is not None and not self._jobs:
                return Turn(ask=ask, end=True)
            if self._changed:
                self._drop()
            pools = [turn for number in range(len(mesh.pools)) if (turn := self._pool_turn(mesh, number, now))]
            self._scored = ticket = self._scorings.take()
            if ticket is not None:
                self._waiting -= 1
            return Turn(pools, None if ticket is None else ticket.job.scorings[ticket.index], ask)

    def _drop(self) -> None:
        self._changed = False
        for waiting in (*self._rows, self._scorings):
            self._waiting -= len(waiting.drop(lambda ticket: ticket.job.gone))

    def _pool_turn(self, mesh: Mesh, number: int, now: float) -> PoolTurn | None:
        pool, waiting = mesh.pools[number], self._rows[number]
        empty = [slot for slot, (row, _) in pool.held.items() if self._flying[row].job.gone]
        for slot in empty:
            del self._flying[pool.held[slot][0]]
        free = [slot for slot in range(pool.count) if slot not in pool.held or slot in empty]
        if mesh.engine.config.is_autoregressive:
            # Those that generate wait while prompts are read.
            free = free[: _PREFILLS * mesh.engine.layout.spec.data]
        enter = []
        for slot in free:
            ticket = waiting.take()
            if ticket is None:
                break
            self._waiting -= 1
            row = next(self._numbers)
            request = ticket.job.rows[ticket.index]
            ticket.entered = now
            self._flying[row] = ticket
            enter.append((slot, row, request))
            self.metrics.entered(len(request.tokens), now - ticket.job.arrived)
        staying = [row for slot, (row, _) in pool.held.items() if slot not in empty]
        if not (staying or enter or empty):
            return None
        taken = {slot for slot, _, _ in enter}
        # For those who stream, and until it is known when a row's first token stood.
        rows = [self._flying[row] for row in (*staying, *(row for _, row, _ in enter))]
        look = any(ticket.job.look or not ticket.shown for ticket in rows)
        return PoolTurn(number, [slot for slot in empty if slot not in taken], enter, self._iterations(number), look)

    def _iterations(self, number: int) -> int:
        seconds = self._seconds[number]
        return max(1, min(_MOST_ITERATIONS, int(_LOOK_SECONDS / seconds))) if seconds else 1

    def _deliver(self, outcome: Outcome) -> None:
        now = time.monotonic()
        for pool in outcome.pools:
            self._deliver_pool(pool, now)
        if outcome.scores is not None and self._scored is not None:
            ticket = self._scored
            self._served.append(now)
            self.metrics.forwards(1)
            scores = dict(enumerate(outcome.scores, self._first_of(ticket)))
            self._finish(ticket, lambda: ticket.job.mail.post(scores=scores))

    def _first_of(self, ticket: Ticket) -> int:
        return sum(len(one.rows) for one in ticket.job.scorings[: ticket.index])

    def _deliver_pool(self, outcome: PoolOutcome, now: float) -> None:
        self.metrics.forwards(outcome.forwards)
        if outcome.seconds:
            self._seconds[outcome.pool] = outcome.seconds
        posts: dict[Job, dict[int, np.ndarray]] = {}
        for row, canvas in outcome.canvases.items():
            ticket = self._flying[row]
            own = canvas[len(ticket.job.rows[ticket.index].tokens) :]
            self._show(ticket, int(np.argmax(np.append(own, -1) < 0)), now)
            if ticket.job.look:
                posts.setdefault(ticket.job, {})[ticket.index] = own
        for job, canvases in posts.items():
            job.mail.post(canvases=canvases)
        for result in outcome.results:
            ticket = self._flying.pop(result.number)
            steps = result.commit_steps[result.commit_steps >= 0]
            self._served.append(now)
            config = ticket.job.rows[ticket.index].config
            denoised = isinstance(config, DiffusionConfig)
            self.metrics.left(len(steps), len(np.unique(steps)), denoised, now - ticket.entered)
            self._show(ticket, max(1, config.max_new_tokens), now)
            if ticket.shown and len(steps) > 1:
                self.metrics.between.observe((now - ticket.shown) / (len(steps) - 1))
            results = {ticket.index: result}
            self._finish(ticket, lambda job=ticket.job, results=results: job.mail.post(results=results))  # type: ignore[misc]

    def _show(self, ticket: Ticket, certain: int, now: float) -> None:
        """Note when there are more tokens before a row's first open position; ``certain`` are there now."""
        if certain <= ticket.certain:
            return
        if not ticket.shown:
            ticket.shown = now
            self.metrics.first.observe(now - ticket.job.arrived)
        elif ticket.job.look:
            self.metrics.pieces.observe(now - ticket.grown)
        ticket.certain, ticket.grown = certain, now

    def _finish(self, ticket: Ticket, post: Callable[[], None]) -> None:
        job = ticket.job
        with self._lock:
            if job.gone:
                return
            post()
            job.left -= 1
            if job.left == 0:
                job.gone = True
                self._jobs.discard(job)
                self.metrics.whole.observe(time.monotonic() - job.arrived)
