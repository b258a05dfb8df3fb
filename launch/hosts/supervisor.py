"""A host's supervisor: starts the worker, reports its state to host 0, and exits with the code of all hosts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import mmap
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from typing import IO, Any

from launch.hosts.control import ControlServer
from launch.hosts.faults import (
    EXIT_INTERRUPTED,
    EXIT_RESTART,
    EXIT_USER_ERROR,
    SECONDS_OF_ONE_SIGNAL,
    Fault,
    Timeouts,
    fault_of_status,
    host_name,
)
from launch.hosts.messages import MAX_BYTES, Message, encode, printable, receive, receive_greeting, shorten
from launch.hosts.place import Place, check_coordinator_port
from launch.hosts.secret import SECRET, SECRET_FILE, is_proof, nonce, proof, read_secret
from runtime import InputError

# Name of the last exchange between hosts before the work begins.
BEGUN = "devices"

_HEARTBEAT_SECONDS = 0.5
_RETRY = 0.5  # seconds between attempts to connect to host 0
_SAY_EVERY = 5.0  # seconds between messages about waiting for host 0
_VERDICT_WAIT = 10.0  # seconds to wait for the fault that host 0 chooses
_REAP_WAIT = 5.0  # seconds to wait for the end of a killed worker
_DUMP_WAIT = 1.0  # seconds to wait for the worker's stacks
_LAST_WORDS_WAIT = 3.0  # seconds to wait for the callback of Host.before_end


@dataclass(frozen=True)
class Shared:
    """State that a worker shares with its supervisor, besides their socket.

    Attributes:
      page: memory with two counters: 0 advances while the worker's process runs, 1 with its progress.
      stacks: the file to which the worker writes its stacks on SIGUSR1.
    """

    page: mmap.mmap
    stacks: IO[bytes]

    @classmethod
    def create(cls) -> Shared:
        """Create the shared state. This must happen before the fork."""
        return cls(mmap.mmap(-1, 16), tempfile.TemporaryFile())

    def read(self, counter: int) -> int:
        """Read counter 0 (running) or 1 (progress)."""
        return int(struct.unpack_from("<Q", self.page, 8 * counter)[0])

    def advance(self, counter: int) -> None:
        """Add one to a counter; only the worker calls this."""
        struct.pack_into("<Q", self.page, 8 * counter, self.read(counter) + 1)


def supervise(place: Place, timeouts: Timeouts) -> tuple[socket.socket, Shared]:
    """Fork into supervisor and worker. Returns in the worker; the supervisor exits in here.

    Returns:
      The worker's end of the socket, and the shared state.

    Raises:
      InputError: no secret is given, and the run is not on one machine.
    """
    secret = _own_secret(place)
    own, workers = socket.socketpair()
    shared = Shared.create()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        own.close()
        return workers, shared
    workers.close()
    sys.exit(asyncio.run(Supervisor(place, timeouts, pid, own, shared, secret).run()))


def _own_secret(place: Place) -> bytes:
    secret = read_secret()
    if not secret and not place.is_on_one_machine:
        raise InputError(
            f"several hosts need a shared secret: the same on all hosts, in a file that {SECRET_FILE} names or in "
            f"{SECRET}; openssl rand -hex 32 makes one"
        )
    return secret


async def greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, place: Place, name: str
) -> Fault | None:
    """Authenticate this host and the control server to each other. Returns a fault if one of them fails.

    Raises:
      ConnectionError: the server closes the connection without an answer, as it does if many connect at once.
    """
    own = nonce()
    challenge = await receive_greeting(reader)
    if challenge is None or challenge["kind"] != "challenge":
        raise _closed()
    said = (challenge.get("nonce"), own, place.host, place.hosts, name)
    fields = {"host": place.host, "hosts": place.hosts, "name": name, "nonce": own}
    writer.write(encode("hello", **fields, proof=proof(secret, "host", *said)))
    answer = await receive(reader)
    if answer is None:
        raise _closed()
    if answer["kind"] == "verdict":
        return Fault.parse(answer)
    if not is_proof(answer.get("proof"), secret, "hub", own):
        return Fault("input", "does not know the secret of this run: it is not host 0", EXIT_USER_ERROR, 0)
    return None


def _closed() -> ConnectionError:
    return ConnectionAbortedError(errno.ECONNABORTED, "it closed the connection without an answer")


class Supervisor:
    """Supervises the worker of one host."""

    def __init__(
        self, place: Place, timeouts: Timeouts, pid: int, link: socket.socket, shared: Shared, secret: bytes
    ) -> None:
        """Take the worker that was just forked: its process id, the socket to it, and the state that it shares."""
        self._place = place
        self._secret = secret
        self._timeouts = timeouts
        self._pid = pid
        self._socket = link
        self._shared = shared
        self._name = host_name(place.host, socket.gethostname())
        self._link: asyncio.StreamWriter | None = None
        self._control: asyncio.StreamWriter | None = None
        self._is_known = False  # whether the control server has admitted this host
        self._waiting: list[bytes] = []  # messages to send once the control server has admitted this host
        self._fault: Fault | None = None
        self._done = False
        self._ended = False
        self._begun = False
        self._ended_by = ""  # the signal after which the worker finishes its work in flight
        self._interrupted_at = -math.inf
        self._grace_period: float | None = None
        self._interruptible = False  # whether the worker also ends by itself after Ctrl-C
        self._heartbeat = (0, time.monotonic())
        self._last_words = False

    def _say(self, text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    async def run(self) -> int:
        """Supervise the worker until all hosts are done or the run has failed. Returns the exit code."""
        loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[Fault | None] = loop.create_future()
        self._worker_ended: asyncio.Future[int] = loop.create_future()
        self._worker_told: asyncio.Future[None] = loop.create_future()
        loop.add_signal_handler(signal.SIGTERM, self._on_terminate)
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        control = None
        if self._place.host == 0:
            control = ControlServer(self._place.hosts, self._timeouts, self._say, self._secret)
        tasks = [
            loop.create_task(self._guard(part)) for part in (self._watch_worker(), self._hear_worker(), self._tick())
        ]
        watching = None
        try:
            if control is not None:
                check_coordinator_port(self._place)
                await control.listen(self._place.bind, self._place.control_port)
                watching = loop.create_task(self._guard(control.watch()))
            tasks.append(loop.create_task(self._guard(self._hear_control())))
            fault = await self._outcome
        except InputError as error:
            fault = Fault("input", f"error: {error}", EXIT_USER_ERROR, who=self._name)
        if self._control is not None:
            self._control.close()
        if watching is not None:
            # Tell the other hosts before JAX's coordination service ends with this worker.
            await asyncio.wait([watching], timeout=_VERDICT_WAIT)
        if fault is not None and self._last_words and self._link is not None and not self._ended:
            self._link.write(encode("verdict"))
            told: set[asyncio.Future[Any]] = {self._worker_told, self._worker_ended}
            await asyncio.wait(told, timeout=_LAST_WORDS_WAIT, return_when=asyncio.FIRST_COMPLETED)
        self._kill()
        await asyncio.wait([self._worker_ended], timeout=_REAP_WAIT)
        for task in tasks:
            task.cancel()
        return self._conclude(fault)

    async def _guard(self, part: Any) -> None:
        """Run a task; an error in the supervisor itself ends the run too."""
        try:
            await part
        except Exception as error:
            self._finish(Fault("exception", f"the supervisor failed: {error!r}", who=self._name))

    def _finish(self, fault: Fault | None) -> None:
        if not self._outcome.done():
            self._outcome.set_result(fault)

    def _conclude(self, fault: Fault | None) -> int:
        if fault is None:
            return 0
        own = self._fault
        if own is not None and own.is_consequence and own.text:
            if fault.host == self._place.host:
                self._say(f"{self._name}: {own.text.rstrip()}")
            else:
                self._say(f"{self._name} failed as a consequence: {own.text.rstrip().splitlines()[-1]}")
        shown = own is not None and own.text == fault.text
        if self._place.host == 0 and fault.host != 0 and not shown and "\n" in fault.text.strip():
            self._say(f"{fault.who}:\n{fault.text.rstrip()}")
        advice = "; a restart may help" if fault.code == EXIT_RESTART else ""
        if fault.hosts:
            # For programs that read the log; the sentence below is for people.
            self._say(f"FAULT_HOSTS {','.join(map(str, fault.hosts))}")
        self._say(f"{self._name} stops with exit code {fault.code}{advice}: {fault.describe()}")
        return fault.code

    # ---- the worker -------------------------------------------------------------------------------------------

    async def _watch_worker(self) -> None:
        loop = asyncio.get_running_loop()

        def wait() -> None:
            _, status = os.waitpid(self._pid, 0)
            with contextlib.suppress(RuntimeError):  # the loop is closed because the worker hung in the kernel
                loop.call_soon_threadsafe(self._worker_ended.set_result, status)

        # The loop waits for its own threads at the end, so this one is not among them.
        threading.Thread(target=wait, daemon=True).start()
        status = await asyncio.shield(self._worker_ended)
        self._ended = True
        await asyncio.sleep(0.05)  # leave time to read its last messages
        if status == 0:
            self._send("done")
        elif self._fault is None:
            self._report(fault_of_status(status))

    async def _hear_worker(self) -> None:
        reader, self._link = await asyncio.open_connection(sock=self._socket, limit=MAX_BYTES)
        while (message := await receive(reader)) is not None:
            match message["kind"]:
                case "fault":
                    self._report(Fault.parse(message))
                case "done":
                    self._done = True
                    self._heartbeat = (0, time.monotonic())
                case "gather":
                    self._send("gather", topic=message["topic"], number=message["number"], value=message["value"])
                case "last words":
                    self._last_words = True
                case "grace period":
                    self._grace_period, self._interruptible = float(message["seconds"]), bool(message["interruptible"])
                    self._limit_end()
                case "told":
                    if not self._worker_told.done():
                        self._worker_told.set_result(None)

    def _kill(self) -> None:
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    async def _tick(self) -> None:
        """Check that the worker is running, and send heartbeats to the control server."""
        while True:
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            now, life = time.monotonic(), self._shared.read(0)
            if life != self._heartbeat[0] and not self._done:
                self._heartbeat = (life, now)
            still = now - self._heartbeat[1]
            if not self._ended and self._fault is None:
                if self._done and still > self._timeouts.shutdown:
                    self._report(Fault("frozen", f"its process finished its work but has not exited for {still:.0f} s"))
                elif not self._done and still > self._timeouts.heartbeat:
                    self._report(Fault("frozen", f"its process is frozen: it has not run for {still:.0f} s"))
            self._send("heartbeat", marks=self._shared.read(1), still=0.0 if self._done or self._fault else still)

    async def _dump(self) -> None:
        """Send the worker's stacks to the control server."""
        file = self._shared.stacks
        file.seek(0)
        file.truncate()
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGUSR1)
        deadline = time.monotonic() + _DUMP_WAIT
        size = -1
        while time.monotonic() < deadline and (size <= 0 or size != os.fstat(file.fileno()).st_size):
            size = os.fstat(file.fileno()).st_size
            await asyncio.sleep(0.1)
        file.seek(0)
        text = file.read().decode(errors="replace")
        self._send("stacks", text=shorten(text) or "(its process does not answer)")

    def _report(self, fault: Fault) -> None:
        """Print a fault of this host and report it to the control server."""
        if self._fault is not None:
            return
        self._fault = fault
        if not fault.is_consequence:
            prefix = "" if fault.code == EXIT_USER_ERROR else f"{self._name}: "
            self._say(prefix + fault.text.rstrip())
        self._send("fault", **fault.fields())
        own = replace(fault, host=self._place.host, who=self._name)
        asyncio.get_running_loop().call_later(_VERDICT_WAIT if self._control else 0.5, self._finish, own)

    # ---- the control server -----------------------------------------------------------------------------------

    def _send(self, kind: str, **fields: Any) -> None:
        line = encode(kind, **fields)
        if self._control is not None and self._is_known:
            if not self._control.is_closing():
                self._control.write(line)
        elif kind != "heartbeat":
            self._waiting.append(line)

    async def _connect(self) -> asyncio.StreamReader | None:
        """Join the run at the control server, retrying until it answers; None if it refuses or is missing."""
        place = self._place
        if place.host == 0:
            address = "localhost" if place.bind in ("[::]", "::", "0.0.0.0") else place.bind
        else:
            address = place.coordinator_host
        started = said = time.monotonic()
        while True:
            try:
                reader, writer = await asyncio.wait_for(
                    asyncio.open_connection(address.strip("[]"), place.control_port, limit=MAX_BYTES), 5.0
                )
                self._control = writer
                return reader if await self._greet(reader, writer) else None
            except (OSError, TimeoutError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
                if self._control is not None:
                    self._control.close()
                    self._control = None
            now = time.monotonic()
            where = f"{address}:{place.control_port}"
            if now - started > self._timeouts.initialization:
                text = f"is missing: no answer at {where} ({reason}) within {now - started:.0f} s"
                self._finish(Fault("missing", text, host=0, who="host 0"))
                return None
            if now - said > _SAY_EVERY:
                said = now
                self._say(f"{self._name}: waiting for host 0 at {where} for {now - started:.0f} s ({reason})")
            await asyncio.sleep(_RETRY)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Authenticate with the control server. Return whether it admits this host; a refusal ends the run here."""
        try:
            greeting = greet(reader, writer, self._secret, self._place, socket.gethostname())
            refusal = await asyncio.wait_for(greeting, self._timeouts.heartbeat)
        except TimeoutError:
            refusal = Fault("gone", "does not answer: another program listens on its port, or it is frozen", host=0)
        if refusal is not None:
            self._finish(replace(refusal, who=refusal.who or f"host 0 ({self._place.coordinator_host})"))
        return refusal is None

    async def _hear_control(self) -> None:
        reader = await self._connect()
        if reader is None or self._control is None:
            return
        self._is_known = True
        for line in self._waiting:
            self._control.write(line)
        text = "is gone: its connection closed"
        while True:
            try:
                message: Message | None = await asyncio.wait_for(receive(reader), self._timeouts.heartbeat)
            except TimeoutError:
                text, message = f"is gone: no heartbeat for {self._timeouts.heartbeat:.0f} s", None
            if message is None:
                self._finish(Fault("gone", text, host=0, who=f"host 0 ({self._place.coordinator_host})"))
                return
            match message["kind"]:
                case "gathered":
                    self._begun = self._begun or message["topic"] == BEGUN
                    if self._link is not None:
                        self._link.write(encode("gathered", topic=message["topic"], values=message["values"]))
                case "terminated":
                    if self._link is not None:
                        self._link.write(encode("terminated", interrupted=message["interrupted"]))
                case "dump":
                    await self._dump()
                case "verdict":
                    self._finish(Fault.parse(message))
                    return
                case "bye":
                    self._finish(None)
                    return

    # ---- signals ----------------------------------------------------------------------------------------------

    def _on_terminate(self) -> None:
        if self._ended_by or not self._is_in_flight:
            text = "a second SIGTERM" if self._ended_by else "SIGTERM before any work was in flight"
            self._report(Fault("stopped", f"stopped at once by {text}"))
            return
        self._say(f"{self._name} received SIGTERM: finishing work in flight; a second SIGTERM stops at once")
        self._drain("SIGTERM")

    def _on_interrupt(self) -> None:
        """Let a worker that prints what it has end by itself; stop others at once, and all after a second Ctrl-C."""
        now = time.monotonic()
        if self._interruptible and self._is_in_flight and not self._ended_by:
            self._interrupted_at = now
            self._say(f"{self._name}: stopping: the text so far follows; a second Ctrl-C stops at once")
            self._drain("Ctrl-C")
        elif now - self._interrupted_at > SECONDS_OF_ONE_SIGNAL:  # a terminal and ``diffumesh local`` pass on the same
            self._report(Fault("stopped", "interrupted", EXIT_INTERRUPTED))

    @property
    def _is_in_flight(self) -> bool:
        """Whether there is work that a signal may not stop at once."""
        return self._begun and self._grace_period != 0

    def _drain(self, received: str) -> None:
        """Tell all workers to end, because of a signal that this host received."""
        self._ended_by, interrupted = received, received == "Ctrl-C"
        self._send("terminated", interrupted=interrupted)
        if self._link is not None:
            self._link.write(encode("drain", interrupted=interrupted))
        self._limit_end()

    def _limit_end(self) -> None:
        """After a signal, report a fault if the run does not end within its grace period."""
        if self._ended_by and self._grace_period is not None:
            code = EXIT_INTERRUPTED if self._ended_by == "Ctrl-C" else EXIT_RESTART
            late = Fault("stopped", f"did not end within {self._grace_period:.0f} s after {self._ended_by}", code)
            asyncio.get_running_loop().call_later(self._grace_period, self._report, late)
