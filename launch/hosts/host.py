"""The host that a command runs on: its process index, messages between all hosts, and the signals it receives."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import math
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, Self

from checkpoints import OtherProcessError
from launch.hosts.faults import (
    EXIT_INTERRUPTED,
    EXIT_RESTART,
    EXIT_USER_ERROR,
    SECONDS_OF_ONE_SIGNAL,
    HostsDifferError,
    Timeouts,
)
from launch.hosts.messages import decode, encode, shorten
from launch.hosts.place import Place
from launch.hosts.supervisor import Shared, supervise
from runtime import InputError

# Seconds after which a process that is interrupted with no results to write exits in any case.
SECONDS_TO_STOP = 5.0

_TICK = 0.25
_PR_SET_PDEATHSIG = 1
_KILLED_WITHIN = 30.0  # seconds in which the supervisor kills the worker after a fault

# Lower bound, in seconds, of JAX's heartbeat timeout. JAX's heartbeat is the fallback if supervisors fail, so it must
# not expire before working supervisors act.
_LEAST_JAX_HEARTBEAT = 100


class Host:
    """The only host of a run. As a context manager it handles SIGTERM and Ctrl-C, and detects stalls.

    :class:`Member`, one of several hosts, has the same methods.
    """

    process_index = 0
    count = 1

    def __init__(self, stall_timeout: float = math.inf) -> None:
        """Create the host. The process exits after ``stall_timeout`` seconds without progress."""
        self._terminated = self._interrupted = False
        self._stall_timeout = stall_timeout
        self._moved = math.inf  # infinite until the first progress
        self._grace_period = math.inf
        self._end_by = self._stop_by = self._interrupted_at = math.inf
        self._wakeup: tuple[int, int] | None = None
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # Python runs signal handlers in the main thread, which may be waiting for devices. A thread therefore reads
            # the signals from a pipe.
            self._wakeup = os.pipe()
            os.set_blocking(self._wakeup[1], False)
            signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
            self._before = signal.signal(signal.SIGTERM, lambda number, frame: None)
            threading.Thread(target=self._watch, args=(self._wakeup[0],), name="watch", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._wakeup is not None:
            signal.signal(signal.SIGTERM, self._before)
            signal.set_wakeup_fd(-1)
            os.close(self._wakeup[1])
            self._wakeup = None

    def _watch(self, pipe: int) -> None:
        while True:
            ready, _, _ = select.select([pipe], [], [], min(1.0, self._stall_timeout))
            received = os.read(pipe, 64) if ready else None
            if received == b"":
                os.close(pipe)
                return
            self._interrupt(signal.SIGINT in (received or b""))
            for _ in range((received or b"").count(signal.SIGTERM)):
                if self._terminated or not self._in_flight:
                    text = "a second SIGTERM" if self._terminated else "SIGTERM before any work was in flight"
                    print(f"stopped at once by {text}", file=sys.stderr, flush=True)
                    os._exit(EXIT_RESTART)
                self._terminated = True
                self._end_by = time.monotonic() + self._grace_period
                print(
                    "received SIGTERM: finishing work in flight; a second SIGTERM stops at once",
                    file=sys.stderr,
                    flush=True,
                )
            now = time.monotonic()
            if now - self._moved > self._stall_timeout:
                _give_up(f"no progress for {self._stall_timeout:.0f} s")
            if now > self._end_by:
                _give_up(f"did not end within {self._grace_period:.0f} s after SIGTERM")

    def _interrupt(self, received: bool) -> None:
        """Note a Ctrl-C. Exit if it is the second, or if nothing is in flight and Python has not ended in time.

        Python raises ``KeyboardInterrupt`` only once the main thread has left code in C, such as the compiler.
        """
        now = time.monotonic()
        if received and now - self._interrupted_at > SECONDS_OF_ONE_SIGNAL:
            self._stop_by = now - 1
        if received and not self._interrupted:
            self._interrupted, self._interrupted_at = True, now
            self._stop_by = math.inf if self._in_flight else now + SECONDS_TO_STOP - 1
        if now > self._stop_by:
            print("interrupted", file=sys.stderr, flush=True)
            os._exit(EXIT_INTERRUPTED)

    @property
    def _in_flight(self) -> bool:
        """Whether there is work that SIGTERM or Ctrl-C may not stop at once."""
        return self._moved < math.inf and self._grace_period > 0

    def mark(self) -> None:
        """Note progress. All hosts call this at the same points, so that their counts show which one is behind."""
        self._moved = time.monotonic()

    def gather(self, topic: str, value: Any) -> list[Any]:
        """Exchange a JSON value with all hosts: each makes this call, waits, and gets the values by process index."""
        return [json.loads(json.dumps(value))]

    @property
    def terminated(self) -> bool:
        """Whether this host received SIGTERM."""
        return self._terminated

    @property
    def any_terminated(self) -> bool:
        """Whether any host is known to have received SIGTERM, or one of several hosts Ctrl-C.

        Each learns of it at a time of its own. See :meth:`draining` for an answer that all hosts share.
        """
        return self._terminated

    @property
    def interrupted(self) -> bool:
        """Whether this host received Ctrl-C, even if the main thread has not noticed it yet.

        Of several hosts, each is told if any received one, at a time of its own.
        """
        return self._interrupted

    def draining(self) -> bool:
        """Return whether any host received SIGTERM, so that the run should finish its work in flight and exit.

        All hosts get the same answer.
        """
        return any(self.gather("drain", self._terminated))

    def end_within(self, seconds: float, *, interruptible: bool = False) -> None:
        """Limit the seconds that this process may run after SIGTERM, even if something in it hangs.

        Args:
          seconds: the limit. 0 means that no work is in flight: SIGTERM stops the process at once.
          interruptible: whether, on several hosts, the first Ctrl-C lets the process end by itself, as SIGTERM does.
        """
        self._grace_period = seconds
        if self._terminated:
            self._end_by = min(self._end_by, time.monotonic() + seconds)

    def before_end(self, tell: Callable[[], None]) -> None:
        """Register a callback that runs, in another thread, shortly before a fault on any host ends this process."""

    def finish(self) -> None:
        """Note that the command has finished on this host."""

    def fail(self, error: BaseException) -> None:
        """Report an uncaught error of the command."""


def _give_up(why: str) -> NoReturn:
    faulthandler.dump_traceback(all_threads=True)
    print(f"{why}; a restart may help", file=sys.stderr, flush=True)
    os._exit(EXIT_RESTART)


class Member(Host):
    """One of several hosts, in its worker process."""

    def __init__(self, place: Place, timeouts: Timeouts, link: socket.socket, shared: Shared) -> None:
        """Connect to the supervisor, and start the thread that regularly reports that this process is running."""
        super().__init__()
        self.process_index, self.count = place.host, place.hosts
        self._place = place
        self._timeouts = timeouts
        self._link = link
        self._shared = shared
        self._asked = 0
        self._any_terminated = False
        self._tell: Callable[[], None] = lambda: None
        self._answers: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._sending = threading.Lock()
        # The supervisor handles signals and ends this process, which must not outlive the supervisor.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _keep_stdout_for_results()
        faulthandler.register(signal.SIGUSR1, file=shared.stacks.fileno(), all_threads=True)
        threading.Thread(target=self._listen, name="supervisor-link", daemon=True).start()
        threading.Thread(target=self._live, name="life", daemon=True).start()

    def __enter__(self) -> Self:
        """Wait until all hosts have joined, then initialise JAX's distributed runtime."""
        import jax

        place, timeouts = self._place, self._timeouts
        self.gather("join", None)
        if hasattr(jax.config, "jax_enable_preemption_service"):
            jax.config.update("jax_enable_preemption_service", False)  # the supervisor handles SIGTERM
        jax.distributed.initialize(
            coordinator_address=place.coordinator,
            num_processes=place.hosts,
            process_id=place.host,
            local_device_ids=place.local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=int(timeouts.initialization),
            heartbeat_timeout_seconds=max(_LEAST_JAX_HEARTBEAT, 2 * int(timeouts.heartbeat)),
            shutdown_timeout_seconds=int(timeouts.shutdown),
            coordinator_bind_address=f"{place.bind}:{place.coordinator.rpartition(':')[2]}",
        )
        return self

    def mark(self) -> None:
        """Note progress, in memory that the supervisor reads."""
        self._shared.advance(1)

    def gather(self, topic: str, value: Any) -> list[Any]:
        """Exchange a JSON value with all hosts through host 0. Returns the values by process index."""
        self._asked += 1
        self.mark()
        self._send(encode("gather", topic=topic, number=self._asked, value=value))
        return self._answers.get()

    @property
    def any_terminated(self) -> bool:
        """Whether any host is known to have received SIGTERM, as host 0 has told all supervisors."""
        return self._any_terminated

    def end_within(self, seconds: float, *, interruptible: bool = False) -> None:
        """Pass the limit to the supervisor, which handles SIGTERM and Ctrl-C."""
        self._send(encode("grace period", seconds=seconds, interruptible=interruptible))

    def before_end(self, tell: Callable[[], None]) -> None:
        """Register the callback. The supervisor waits a few seconds for it before it ends this process."""
        self._tell = tell
        self._send(encode("last words"))

    def finish(self) -> None:
        """Report that this host is done, and leave JAX's coordination service together with the others."""
        import jax

        self._send(encode("done"))
        jax.distributed.shutdown()

    def fail(self, error: BaseException) -> NoReturn:
        """Report the error to the supervisor, and wait until it ends this process."""
        differing: list[int] = []
        if isinstance(error, InputError):
            fault, text, code = "input", f"error: {error}", EXIT_USER_ERROR
            if isinstance(error, HostsDifferError):
                fault, differing = "differ", error.hosts
            elif isinstance(error, OtherProcessError):
                fault = "followed"
        else:
            text, code = "".join(traceback.format_exception(error)), EXIT_RESTART
            fault = "device" if _is_of_devices(error) else "exception"
        sys.stdout.flush()
        self._send(encode("fault", fault=fault, text=shorten(text), code=code, differing=differing))
        time.sleep(_KILLED_WITHIN)
        os._exit(code)

    def _send(self, line: bytes) -> None:
        with self._sending:
            self._link.sendall(line)

    def _live(self) -> None:
        while True:
            self._shared.advance(0)
            time.sleep(_TICK)

    def _listen(self) -> None:
        for line in self._link.makefile("rb"):
            message = decode(line)
            if message["kind"] == "gathered":
                self._answers.put(message["values"])
            elif message["kind"] in ("drain", "terminated"):
                # Ctrl-C first: a thread that sees the end of the run reads then what ends it.
                self._interrupted = self._interrupted or bool(message["interrupted"])
                if message["kind"] == "drain":
                    self._terminated = True
                self._any_terminated = True
            elif message["kind"] == "verdict":
                with contextlib.suppress(Exception):  # the process ends either way
                    self._tell()
                self._send(encode("told"))
        os._exit(EXIT_RESTART)  # the supervisor is gone


def _keep_stdout_for_results() -> None:
    """Keep the notes of C++ libraries (gloo, NCCL) out of standard output.

    They write to descriptor 1, which becomes standard error; ``sys.stdout`` writes to the original standard output.
    """
    results = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(results, "w", 1, "utf-8")


def _is_of_devices(error: BaseException | None) -> bool:
    """Whether an error comes from the devices. Devices also fail when another host is gone."""
    import jax

    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        error = error.__cause__ or error.__context__
    return False


def join(place: Place, timeouts: Timeouts) -> Host:
    """Become one of several hosts. Returns in the worker process; the supervisor never returns."""
    link, shared = supervise(place, timeouts)
    return Member(place, timeouts, link, shared)
