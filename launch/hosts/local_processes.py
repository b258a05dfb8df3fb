"""Several processes on one machine that form one run, each with simulated CPU devices."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO

from launch.hosts.faults import EXIT_RESTART
from launch.hosts.secret import SECRET, SECRET_FILE, new_secret
from runtime import InputError

_PR_SET_PDEATHSIG = 1

# Ports below the range that the system assigns by itself (on Linux from 32768).
_FIRST_PORT, _LAST_PORT = 20000, 32000


def free_port() -> int:
    """Find a free port whose successor is free too.

    It lies outside the range from which the system assigns ports, because it is bound only seconds later.
    """
    while True:
        port = 2 * secrets.randbelow((_LAST_PORT - _FIRST_PORT) // 2) + _FIRST_PORT
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port


def environment(process_index: int, count: int, port: int, devices: int, secret: str) -> dict[str, str]:
    """Return the environment variables for one process; all processes of a run share the secret."""
    around = {name: value for name, value in os.environ.items() if name != SECRET_FILE}
    return around | {
        SECRET: secret,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(process_index),
        "PYTHONUNBUFFERED": "1",
    }


def worst(codes: Sequence[int]) -> int:
    """Return the most severe exit code: any other error comes before one that a restart may fix, and that before 0."""
    return max(codes, key=lambda code: (code != 0, code != EXIT_RESTART, code))


class Processes:
    """The processes of one run.

    Attributes:
      output_error: why results could not be written to standard output; None if they could, or if nobody reads them.
    """

    def __init__(self, command: Sequence[str], count: int, devices: int, port: int) -> None:
        """Start the processes.

        Args:
          command: the command that each process runs.
          count: number of processes.
          devices: simulated CPU devices per process.
          port: port of the coordinator, which process 0 runs.

        Raises:
          InputError: the command does not exist.
        """
        self._started: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self.output_error: OSError | None = None
        secret = new_secret()
        for process_index in range(count):
            try:
                process = subprocess.Popen(
                    command,
                    env=environment(process_index, count, port, devices, secret),
                    stdin=None if process_index == 0 else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    preexec_fn=_die_with_parent if sys.platform == "linux" else None,
                )
            except OSError as error:
                self.kill()
                raise InputError(f"{command[0]}: {error.strerror or error}") from error
            self._started.append(process)
            assert process.stdout is not None
            assert process.stderr is not None
            self._read(process.stdout, None if process_index == 0 else process_index)
            self._read(process.stderr, process_index)

    def _read(self, stream: IO[bytes], process_index: int | None) -> None:
        thread = threading.Thread(target=self._pass_on, args=(stream, process_index), daemon=True)
        thread.start()
        self._readers.append(thread)

    def _pass_on(self, stream: IO[bytes], process_index: int | None) -> None:
        out = sys.stdout.buffer if process_index is None else sys.stderr.buffer
        prefix = b"" if process_index is None else f"[{process_index}] ".encode()
        try:
            # If nobody reads our output any more, close the pipe, so that the process gets an error and does not block.
            with stream:
                for line in stream:
                    out.write(prefix + line)
                    out.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # discard the rest of the buffer
            if process_index is None and not isinstance(error, BrokenPipeError):
                self.output_error = error
        except ValueError:
            pass

    def codes(self) -> list[int | None]:
        """Exit codes as a shell reports them; None for running processes."""
        found = [process.poll() for process in self._started]
        return [128 - code if code is not None and code < 0 else code for code in found]

    def send(self, number: int) -> None:
        """Send a signal to the leader of each running process group."""
        for process in self._started:
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        """Kill all process groups."""
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def finish_output(self, interrupted: Callable[[], object]) -> None:
        """Wait until all output has been copied: results for as long as their reader takes, messages for 5 s at most.

        All processes have ended, so nothing more is written.

        Args:
          interrupted: whether this process is to end. From then on, results too are waited for 5 s at most.
        """
        results = self._readers[0]
        while results.is_alive() and not interrupted():
            results.join(timeout=0.05)
        for thread in self._readers:
            thread.join(timeout=5.0)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
