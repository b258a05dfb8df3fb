"""Run a launcher as several processes on this machine: what a user tries first, and the bench that tests run on.

  diffumesh local --num_processes=4 --devices_per_process=2 -- diffumesh generate --mesh=tensor=8 ...

Each process simulates its devices on the CPU, and they talk through gloo. Process 0 has the standard input, and what it
prints on standard output goes to standard output; every other line goes to standard error with the index of its
process in front. When one process fails, the others have --grace seconds to end too, and are killed then; the exit code
is that of the worst. SIGTERM and Ctrl-C are handed on.
"""

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
import time
from collections.abc import Sequence
from typing import IO

from absl import flags

from launch.hosts.faults import EXIT_RESTART
from launch.hosts.secret import SECRET, SECRET_FILE, new_secret
from launch.startup import run_launcher
from runtime import InputError

_MAX_PROCESSES = 64
_PR_SET_PDEATHSIG = 1

# Below the range from which systems take ports of their own choice (on Linux from 32768).
_FIRST_PORT, _LAST_PORT = 20000, 32000


def define_flags(values: flags.FlagValues) -> None:
    """Define this launcher's flags."""
    flags.DEFINE_integer("num_processes", 2, "Processes to start.", 1, _MAX_PROCESSES, flag_values=values)
    flags.DEFINE_integer("devices_per_process", 1, "CPU devices that each simulates.", 1, 4096, flag_values=values)
    flags.DEFINE_integer("port", None, "Coordinator's port. Default: a free one.", 1, 65534, flag_values=values)
    flags.DEFINE_float("grace", 15.0, "Seconds for the others to end when one has failed.", 0.0, flag_values=values)


def free_port() -> int:
    """A port of this machine that is free now, and so is the next.

    It is drawn from those that the system gives to nobody by itself, for it is bound only seconds later.
    """
    while True:
        port = 2 * secrets.randbelow((_LAST_PORT - _FIRST_PORT) // 2) + _FIRST_PORT
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port


def environment(process_index: int, count: int, port: int, devices: int, secret: str) -> dict[str, str]:
    """Variables of one process; all of a run have one secret."""
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
    """The exit code that says most: anything over one that a restart may help, over none."""
    return max(codes, key=lambda code: (code != 0, code != EXIT_RESTART, code))


class Processes:
    """The processes of one run."""

    def __init__(self, command: Sequence[str], count: int, devices: int, port: int) -> None:
        """Start them.

        Raises:
          InputError: there is no such command.
        """
        self._started: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
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
        thread = threading.Thread(target=_pass_on, args=(stream, process_index), daemon=True)
        thread.start()
        self._readers.append(thread)

    def codes(self) -> list[int | None]:
        """Exit codes as a shell gives them, None of those that run."""
        found = [process.poll() for process in self._started]
        return [128 - code if code is not None and code < 0 else code for code in found]

    def send(self, number: int) -> None:
        """A signal to the leader of each process group that still runs."""
        for process in self._started:
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        """End everything that any of them has started."""
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def finish_output(self) -> None:
        """Wait for what they printed."""
        for thread in self._readers:
            thread.join(timeout=5.0)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _pass_on(stream: IO[bytes], process_index: int | None) -> None:
    out = sys.stdout.buffer if process_index is None else sys.stderr.buffer
    prefix = b"" if process_index is None else f"[{process_index}] ".encode()
    try:
        # Closed where the reader of ours went away: the process hears of it, and does not wait for a pipe to be read.
        with stream:
            for line in stream:
                out.write(prefix + line)
                out.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # what is left in the buffer
    except ValueError:
        pass


def main(values: flags.FlagValues, command: Sequence[str]) -> int:
    """Run the processes. Returns the exit code."""
    if not command:
        raise InputError("no command: write it after --, such as -- diffumesh generate --prompt='def f(x):'")
    processes = Processes(command, values.num_processes, values.devices_per_process, values.port or free_port())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: processes.send(received))
    failed_at = None
    late: list[int] = []
    try:
        while None in (codes := processes.codes()):
            if failed_at is None and any(codes):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > values.grace:
                late = [process_index for process_index, code in enumerate(codes) if code is None]
                print(f"killing process {', '.join(map(str, late))}: another has failed", file=sys.stderr, flush=True)
                break
            time.sleep(0.05)
    finally:
        processes.kill()
    processes.finish_output()
    codes = processes.codes()
    if any(codes):
        print(f"exit codes: {', '.join(map(str, codes))}", file=sys.stderr, flush=True)
    # What was frozen is no fault of the user's: it was killed here, and another start may do better.
    return worst([EXIT_RESTART if number in late else code for number, code in enumerate(codes) if code is not None])


def run(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    argv = list(sys.argv if argv is None else argv)
    own, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    code = 0

    def start(values: flags.FlagValues) -> None:
        nonlocal code
        code = main(values, command)

    run_launcher(start, define_flags, __doc__ or "", own)
    sys.exit(code)


if __name__ == "__main__":
    run()
