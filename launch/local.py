"""Run a command as several processes on this machine, to try out or test a run on several hosts.

  diffumesh local --num_processes=4 --devices_per_process=2 -- diffumesh generate --mesh=tensor=8 ...

Each process simulates its devices on the CPU; the processes communicate through gloo. Process 0 reads standard input,
and its standard output is passed on. All other output goes to standard error, with the index of its process in front.
When a process fails, the others have --grace seconds to end, and are then killed. The exit code is the most severe one.
SIGTERM and Ctrl-C are passed on.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence

from absl import flags

from launch.hosts.faults import EXIT_RESTART
from launch.hosts.local_processes import Processes, free_port, worst
from launch.process.real_flags import define_real
from launch.process.startup import run_launcher
from runtime import InputError

_MAX_PROCESSES = 64


def define_flags(values: flags.FlagValues) -> None:
    """Define the flags of this command."""
    flags.DEFINE_integer("num_processes", 2, "Processes to start.", 1, _MAX_PROCESSES, flag_values=values)
    flags.DEFINE_integer("devices_per_process", 1, "Simulated CPU devices per process.", 1, 4096, flag_values=values)
    flags.DEFINE_integer("port", None, "Coordinator's port. Default: a free one.", 1, 65534, flag_values=values)
    define_real("grace", 15.0, "Seconds from a failure until the other processes are killed.", 0.0, values=values)


def main(values: flags.FlagValues, command: Sequence[str]) -> int:
    """Run ``diffumesh local``: start the processes, wait for them, and return the exit code."""
    if not command:
        raise InputError("no command: write it after --, such as -- diffumesh generate --prompt='def f(x):'")
    # Before the processes start: a signal that arrives meanwhile must end them too, not this process alone.
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: received.append(number))
    processes = Processes(command, values.num_processes, values.devices_per_process, values.port or free_port())
    failed_at, sent = None, 0
    late: list[int] = []
    try:
        while None in (codes := processes.codes()):
            while sent < len(received):
                processes.send(received[sent])
                sent += 1
            if failed_at is None and any(codes):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > values.grace:
                late = [process_index for process_index, code in enumerate(codes) if code is None]
                print(f"killing process {', '.join(map(str, late))}: another has failed", file=sys.stderr, flush=True)
                break
            time.sleep(0.05)
    finally:
        processes.kill()
    processes.finish_output(lambda: received)
    if (error := processes.output_error) is not None:
        raise InputError(f"standard output: {error.strerror or error}")
    codes = processes.codes()
    if any(codes):
        print(f"exit codes: {', '.join(map(str, codes))}", file=sys.stderr, flush=True)
    # A frozen process was killed here: that is not the user's fault, and a restart may help.
    ended = [(process_index, code) for process_index, code in enumerate(codes) if code is not None]
    return worst([EXIT_RESTART if process_index in late else code for process_index, code in ended])


def run(argv: Sequence[str] | None = None) -> None:
    """Run ``diffumesh local`` from the command line."""
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
