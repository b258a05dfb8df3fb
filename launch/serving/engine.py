"""The thread that owns the engine, and the methods that other threads call.

In each step, aborted rows are evicted, waiting rows are inserted into free slots, every row in a slot advances by a few
iterations, and the results are put into the response streams. Host 0 decides on the step; all hosts execute it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from launch.serving.compilation import Compilation, Report
from launch.serving.errors import ENGINE_FAILED, NON_FINITE_LOGITS, ApiError, busy, too_late, unavailable
from launch.serving.metrics import Metrics
from launch.serving.response_stream import ResponseStream
from launch.serving.turns import Hosts, Turns
from runtime import (
    CanvasChanged,
    DiffusionConfig,
    Event,
    Executor,
    FirstToken,
    PrefixGrown,
    Programs,
    RequestFinished,
    RequestHandle,
    RowFinished,
    RowInserted,
    RowResult,
    RowsScored,
    Scheduler,
    StepPlan,
)

State = Literal["warming up", "ready", "draining", "dead"]
_REFUSALS = {"warming up": "The server is warming up.", "draining": "The server is shutting down."}

_IDLE_SECONDS = 0.25  # between two steps without work
_REPORT_SECONDS = 0.5  # between two reports of the hosts, unless host 0 has compiled something meanwhile
_COMPILER_SECONDS = 10.0  # to wait for a compilation that is running when the server ends
_RATE_SAMPLES = 64  # number of finish times from which the rate of service is estimated
_MAX_RETRY_SECONDS = 60
_RESERVED = 8  # one in so many places of the queue is kept from clients with waiting rows


@dataclass(frozen=True)
class HostStep:
    """One step of the server, which all hosts execute.

    Attributes:
      plan: what the devices do.
      compile: the programs to compile next in the background, if any.
      report: whether all hosts report after the step, see :func:`exchange_reports`.
      last: whether the server ends after the step.
    """

    plan: StepPlan
    compile: Programs | None = None
    report: bool = False
    last: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the step as JSON values, for the other hosts."""
        compiled = None if self.compile is None else self.compile.to_json()
        return {"plan": self.plan.to_json(), "compile": compiled, "report": self.report, "last": self.last}

    @classmethod
    def from_json(cls, step: Any) -> HostStep:
        """Return the step that :meth:`to_json` wrote."""
        compiled = None if step["compile"] is None else Programs.from_json(step["compile"])
        return cls(StepPlan.from_json(step["plan"]), compiled, step["report"], step["last"])


def _is_non_finite(event: Event) -> bool:
    """Whether an event is the end of a row or of a score pass in which the model's logits were not finite."""
    match event:
        case RowFinished():
            return event.result.non_finite
        case RowsScored():
            return not all(np.isfinite(scores).all() for scores in event.scores)
    return False


def take_turn(turns: Turns, hosts: Hosts, step: HostStep | None) -> HostStep:
    """Send the step that host 0 has decided on to all hosts, and return it. The other hosts pass None."""
    if hosts.count == 1:
        assert step is not None
        hosts.mark()
        return step
    sent = turns.broadcast(None if step is None else step.to_json())
    return step or HostStep.from_json(sent)


def exchange_reports(turns: Turns, hosts: Hosts, compiled: Report) -> tuple[bool, list[Report]]:
    """Tell all hosts whether this one received SIGTERM and what it has compiled, and receive the same from them.

    Returns:
      Whether any host received SIGTERM, and the report of each host.
    """
    said = turns.gather([hosts.terminated, list(compiled)])
    return any(terminated for terminated, _ in said), [own for _, own in said]


def load_cached(compilation: Compilation, turns: Turns) -> list[Report]:
    """Load the programs that all hosts have in their persistent caches, and run each, before requests are accepted.

    Returns:
      The report of each host.
    """
    while not turns.draining() and all(turns.gather(compilation.is_cached)):
        compilation.load()
        if None not in (report[-1] for report in turns.gather(list(compilation.report))):
            compilation.run_loaded()
    return turns.gather(list(compilation.report))


def follow(executor: Executor, hosts: Hosts) -> None:
    """Execute the steps that host 0 decides on, until the last one. All hosts except host 0 call this."""
    turns = Turns(hosts)
    turns.warm_up()
    if not executor.warm_up(turns.draining):
        return
    compilation = Compilation(executor)
    load_cached(compilation, turns)
    while True:
        step = take_turn(turns, hosts, None)
        if step.compile is not None:
            compilation.begin(step.compile)
        executor.execute(step.plan)
        if step.report:
            exchange_reports(turns, hosts, compilation.report)
        if step.last:
            compilation.stop(_COMPILER_SECONDS)
            return


@dataclass
class _Update:
    """The results of one step for one response stream."""

    canvases: dict[int, np.ndarray] = field(default_factory=dict)
    results: dict[int, RowResult] = field(default_factory=dict)
    scores: dict[int, np.ndarray] = field(default_factory=dict)


class ServingEngine:
    """Runs the requests of all threads on the devices, in the thread that calls :meth:`run`.

    Attributes:
      state: the state of the server, as ``/health`` reports it.
      executor: runs the rows in the slots; None while the server is warming up.
      scheduler: assigns rows to slots; None while the server is warming up.
      metrics: metrics of requests and slots.
      cut_short: number of requests that did not finish within the grace period.
      say: prints a line for the user.
    """

    def __init__(self, hosts: Hosts, metrics: Metrics, max_queue: int, grace_period: float) -> None:
        """Create the engine in the state ``warming up``, in which it refuses requests.

        Args:
          hosts: the connection to the other hosts.
          metrics: the metrics to update.
          max_queue: maximum number of rows that wait for a slot. Clients that have waiting rows leave an eighth of it
            to the others, so that many requests of one client do not lock them out.
          grace_period: seconds to finish accepted requests after the server is told to stop.
        """
        self.state: State = "warming up"
        self.executor: Executor | None = None
        self.scheduler: Scheduler | None = None
        self.metrics = metrics
        self.cut_short = 0
        self.say: Callable[[str], None] = lambda text: None
        self._compilation: Compilation | None = None
        self._hosts, self._max_queue, self._grace_period = hosts, max_queue, grace_period
        self._lock = threading.Condition()
        self._streams: dict[RequestHandle, ResponseStream] = {}
        self._finish_times: deque[float] = deque(maxlen=_RATE_SAMPLES)
        self._heartbeat = time.monotonic()
        self._turns = Turns(hosts)
        self._reported = 0.0  # when the hosts last reported
        self._compiled = 0  # programs in the last report of this host
        self._end_by: float | None = None
        metrics.watch(
            "num_requests_running", "Rows in slots.", lambda: self.scheduler.occupied if self.scheduler else 0
        )
        metrics.watch("num_requests_waiting", "Rows and scoring passes that are waiting.", lambda: self._waiting)
        metrics.watch(
            "kv_cache_usage_perc",
            "Fraction of the slots in use, from 0 to 1.",
            lambda: self.scheduler.usage if self.scheduler else 0.0,
        )
        metrics.watch(
            "programs_compiled",
            "Programs compiled, or read from the compile cache, since the start.",
            lambda: self.executor.compiled_programs if self.executor else 0,
        )
        metrics.watch(
            "programs_cached",
            "Programs read from the compile cache since the start.",
            lambda: self.executor.cached_programs if self.executor else 0,
        )
        metrics.watch("programs_remaining", "Buckets whose programs are not compiled yet.", lambda: self.remaining)
        metrics.watch(
            "computed_positions",
            "Positions computed in all slots, over all iterations.",
            lambda: self.scheduler.stats.computed_positions if self.scheduler else 0,
        )
        metrics.watch(
            "useful_positions",
            "Computed positions that belong to a running row.",
            lambda: self.scheduler.stats.useful_positions if self.scheduler else 0,
        )

    # ---- any thread -------------------------------------------------------------------------------------------

    @property
    def remaining(self) -> int:
        """Number of buckets whose programs are not compiled yet; 0 while the server is warming up."""
        return self._compilation.remaining if self._compilation is not None else 0

    @property
    def _waiting(self) -> int:
        return self.scheduler.waiting if self.scheduler else 0

    def check_room(self) -> None:
        """Check that a request can be queued, before its body is read.

        Raises:
          ApiError: the server is not ready, or the queue is full.
        """
        # The engine's thread may change it meanwhile.
        if (state := self.state) != "ready":
            self.metrics.refused(state)
            raise ENGINE_FAILED if state == "dead" else unavailable(_REFUSALS[state])
        if self._waiting >= self._max_queue:
            self.metrics.refused("queue full")
            raise busy(self._retry_after())

    def submit(self, handle: RequestHandle, stream: ResponseStream) -> None:
        """Queue a request. Its results go to ``stream``.

        Raises:
          ApiError: the server is not ready, or the request has more rows than the queue has room for.
        """
        with self._lock:
            self.check_room()
            assert self.scheduler is not None
            kept = self._max_queue // _RESERVED if self.scheduler.awaits(handle.owner) else 0
            if self._waiting + handle.remaining > self._max_queue - kept:
                self.metrics.refused("queue full")
                raise busy(self._retry_after())
            self.scheduler.add(handle)
            self._streams[handle] = stream
            self._lock.notify()

    def abort(self, handle: RequestHandle) -> None:
        """Abort a request, for example because its client has disconnected. A finished request stays finished."""
        with self._lock:
            if self.scheduler is not None and self.scheduler.abort(handle):
                # If a step takes longer than the slack, the response gives up before the engine's thread does.
                self.metrics.aborted("deadline" if time.monotonic() >= handle.deadline else "cancelled")
                del self._streams[handle]
            self._lock.notify()

    def healthy(self, timeout: float) -> bool:
        """Whether the engine's thread is alive and has spent at most ``timeout`` seconds on its present step."""
        return self.state in ("ready", "draining") and time.monotonic() - self._heartbeat < timeout

    def fail(self, error: ApiError, reason: str) -> None:
        """Answer every request that is not finished with an error. ``reason`` is that of the metric."""
        with self._lock:
            # Not the scheduler's unfinished requests: the results of one that it has finished may not be delivered yet.
            for handle in list(self._streams):
                self.metrics.aborted(reason)
                self._refuse(handle, error)

    def _refuse(self, handle: RequestHandle, error: ApiError) -> None:
        assert self.scheduler is not None
        self.scheduler.abort(handle)
        if (stream := self._streams.pop(handle, None)) is not None:
            stream.put(error=error)

    def _retry_after(self) -> int:
        """Estimate the seconds until half the queue is served, from the rate at which recent rows finished."""
        times = list(self._finish_times)
        if len(times) < 2 or times[-1] <= times[0]:
            return 1
        seconds = self._waiting / 2 * (times[-1] - times[0]) / (len(times) - 1)
        return max(1, min(_MAX_RETRY_SECONDS, round(seconds)))

    # ---- the thread that owns the engine ----------------------------------------------------------------------

    def run(self, executor: Executor, alive: Callable[[], bool], ready: Callable[[], None]) -> None:
        """Warm up, then serve until the server is told to stop and every request has been answered.

        If the server is told to stop during warm-up, this returns without serving.

        Args:
          executor: runs the rows in the slots.
          alive: returns whether the HTTP server is still running.
          ready: called when the server begins to accept requests.
        """
        try:
            self._turns.warm_up()
            if not executor.warm_up(self._turns.draining):
                self.state = "draining"
                return
            scheduler = Scheduler([pool.limits for pool in executor.pools])
            self.executor, self.scheduler = executor, scheduler
            self._compilation = compilation = Compilation(executor)
            compilation.restrict(scheduler)
            compilation.settle(load_cached(compilation, self._turns), scheduler, self.say)
            self.say(compilation.list_programs())
            self._heartbeat = time.monotonic()
            self.state = "ready"
            ready()
            while True:
                step = take_turn(self._turns, self._hosts, self._decide(scheduler))
                if step.compile is not None:
                    compilation.begin(step.compile)
                outcome = executor.execute(step.plan)
                self.metrics.forwards(sum(pool.forwards for pool in outcome.pools) + (outcome.scores is not None))
                with self._lock:
                    now = time.monotonic()
                    self._deliver(scheduler.update(outcome, now), now)
                self._heartbeat = time.monotonic()
                if step.report:
                    self._exchange_reports(compilation, scheduler)
                if step.last:
                    return
                if not alive():
                    raise RuntimeError("the HTTP server stopped unexpectedly")
        except BaseException:
            self.state = "dead"
            self.fail(ENGINE_FAILED, "engine failed")
            raise
        finally:
            if self._compilation is not None:
                self._compilation.stop(_COMPILER_SECONDS)

    def _exchange_reports(self, compilation: Compilation, scheduler: Scheduler) -> None:
        self._reported = time.monotonic()
        report = compilation.report
        self._compiled = len(report)
        terminated, compiled = exchange_reports(self._turns, self._hosts, report)
        with self._lock:
            compilation.settle(compiled, scheduler, self.say)
        if terminated and self._end_by is None:
            self.state = "draining"
            self._end_by = time.monotonic() + self._grace_period

    def _decide(self, scheduler: Scheduler) -> HostStep:
        with self._lock:
            if not (scheduler.waiting or scheduler.running):
                self._lock.wait(_IDLE_SECONDS)
            now = time.monotonic()
            for handle in scheduler.expire(now):
                self.metrics.aborted("deadline")
                self._refuse(handle, too_late(handle.deadline - handle.arrived))
            report = self._should_report(now)
            if self._end_by is not None:
                if now > self._end_by and (late := scheduler.unfinished):
                    self.cut_short = len(late)
                    self.fail(unavailable(_REFUSALS["draining"]), "grace period")
                if not scheduler.unfinished:
                    return HostStep(StepPlan(), None, report, last=True)
            if not scheduler.waiting:
                self._finish_times.clear()  # while slots are free, rows finish as rarely as requests arrive
            plan = scheduler.schedule(now)
            draining = self._end_by is not None
            compiled = None if self._compilation is None or draining else self._compilation.choose(scheduler)
            return HostStep(plan, compiled, report)

    def _should_report(self, now: float) -> bool:
        has_compiled = self._compilation is not None and len(self._compilation.report) > self._compiled
        return has_compiled or now - self._reported >= _REPORT_SECONDS

    def _deliver(self, events: Iterable[Event], now: float) -> None:
        """Count the events, and put their results into the response streams, one update per stream."""
        updates: defaultdict[RequestHandle, _Update] = defaultdict(_Update)
        finished, events = [], list(events)
        failed = {event.handle for event in events if _is_non_finite(event)}
        for event in events:
            if _is_non_finite(event):
                if event.handle in self._streams:
                    self.metrics.aborted("non-finite logits")
                self._refuse(event.handle, NON_FINITE_LOGITS)
                continue
            if event.handle in failed and isinstance(event, (FirstToken, RequestFinished)):
                continue  # it was answered with an error, so its times are not those of answers
            self._count(event)
            match event:
                case CanvasChanged():
                    updates[event.handle].canvases[event.index] = event.canvas
                case RowFinished():
                    self._finish_times.append(now)
                    updates[event.handle].results[event.index] = event.result
                case RowsScored():
                    self._finish_times.append(now)
                    updates[event.handle].scores |= dict(enumerate(event.scores, event.first))
                case RequestFinished():
                    finished.append(event.handle)
        for handle, update in updates.items():
            if (stream := self._streams.get(handle)) is not None:  # None if the request was aborted
                stream.put(update.canvases, update.results, update.scores)
        for handle in finished:
            self._streams.pop(handle, None)

    def _count(self, event: Event) -> None:
        """Update the metrics for an event."""
        match event:
            case RowInserted():
                self.metrics.inserted(event.handle.rows[event.index].given, event.seconds)
            case FirstToken():
                self.metrics.first.observe(event.seconds)
            case PrefixGrown():
                self.metrics.pieces.observe(event.seconds)
            case RowFinished():
                denoised = isinstance(event.handle.rows[event.index].config, DiffusionConfig)
                accepted = 0 if event.result.drafts is None else event.result.drafts.accepted
                self.metrics.row_finished(event.tokens, event.steps, denoised, event.seconds, accepted)
                if event.seconds_per_token is not None:
                    self.metrics.between.observe(event.seconds_per_token)
            case RequestFinished():
                self.metrics.whole.observe(event.seconds)
