"""Fault injection: measure how hosts react to a fault on one of them, with real processes here that use gloo.

  python -m benchmarks.faults              the whole table: each fault on the first host and on another
  python -m benchmarks.faults --only=kill,stuck
  python -m benchmarks.faults --attacks    hostile files, bodies, templates, connections and batches: the long forms

For each case it measures the seconds from the fault until all processes of all hosts have ended, the exit codes, and
whether host 0 (or the survivors, if host 0 failed) named the host at fault. For a missing host, the time starts at the
end of the initialisation timeout. For a stuck host, it includes the stall timeout. A frozen supervisor (``freeze``) can
end nothing on its own host: there the time is that of all other hosts. With ``--attacks``, the exit code is 1 if a
time misses its goal.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from absl import flags

from benchmarks.attacks import LONG, missed_goals
from benchmarks.records import build_record, define_record_flags, write_record
from checkpoints import DEMO
from launch.hosts.local_processes import environment, free_port, worst
from launch.hosts.secret import new_secret
from launch.process.startup import run_launcher
from sharding.errors import InputError

CASES = ("kill", "lose", "abort", "stop", "freeze", "exception", "stuck", "flag", "checkpoint", "missing")
HEARTBEAT, STALL, INITIALIZATION = 5, 10, 8
_LIMIT = 180.0


@dataclass(frozen=True)
class Outcome:
    """The result of one case: what a fault on one host led to.

    Attributes:
      case: the fault.
      host: process index of the host with the fault.
      hosts: number of hosts.
      seconds: seconds from the fault until all processes had ended.
      from_start: seconds from the start of the processes until all had ended.
      codes: exit code of each host as a shell reports it; None for a host that was not started or is frozen.
      named: whether host 0, or the survivors if host 0 failed, named the host at fault.
      logs: standard error of each host.
    """

    case: str
    host: int
    hosts: int
    seconds: float
    from_start: float
    codes: list[int | None]
    named: bool
    logs: list[str]

    @property
    def survivors(self) -> list[int]:
        """Exit codes of the processes on hosts that survived the fault."""
        return [code for code in self.codes if code is not None and not (self.case == "lose" and code == 137)]


class HostProcesses:
    """Processes of several hosts on this machine. The end of the ``with`` block kills those that still run."""

    def __init__(self, commands: Sequence[Sequence[str] | None], folder: Path, devices: int = 1) -> None:
        """Start a process for each command that is not None. Its output goes to files in ``folder``."""
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes] | None] = []
        port, secret = free_port(), new_secret()
        for process_index, command in enumerate(commands):
            if command is None:
                self._processes.append(None)
                continue
            with self._path(process_index, "out").open("wb") as out, self._path(process_index, "err").open("wb") as err:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=environment(process_index, len(commands), port, devices, secret),
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                    )
                )

    def __enter__(self) -> HostProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _path(self, process_index: int, kind: str) -> Path:
        return self._folder / f"{process_index}.{kind}"

    @property
    def groups(self) -> list[int]:
        """Process groups of the started hosts, each with a supervisor and its children."""
        return [process.pid for process in self._processes if process is not None]

    def running(self, frozen: int | None = None) -> bool:
        """Whether a process of any host but ``frozen`` is still running: the supervisor or one of its children."""
        for process_index, process in enumerate(self._processes):
            if process is None or process_index == frozen:
                continue
            if process.poll() is None:
                return True
            try:
                os.killpg(process.pid, 0)
                return True
            except (ProcessLookupError, PermissionError):
                pass
        return False

    def wait(self, limit: float = _LIMIT, frozen: int | None = None) -> list[int | None]:
        """Wait until all processes of all hosts but ``frozen`` have ended. Return exit codes as a shell reports them.

        Raises:
          TimeoutError: a process still runs after ``limit`` seconds.
        """
        deadline = time.monotonic() + limit
        while self.running(frozen):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not down after {limit:.0f} s:\n" + "\n".join(self.text("err")))
            time.sleep(0.05)
        codes = [None if process is None else process.returncode for process in self._processes]
        return [128 - code if code is not None and code < 0 else code for code in codes]

    def send(self, process_index: int, which: int) -> None:
        """Send a signal to one host's supervisor."""
        process = self._processes[process_index]
        assert process is not None
        process.send_signal(which)

    def text(self, kind: str) -> list[str]:
        """Return each host's standard output (``out``) or standard error (``err``)."""
        paths = [self._path(process_index, kind) for process_index in range(len(self._processes))]
        return [path.read_text(errors="replace") if path.exists() else "" for path in paths]


def generate_command(*arguments: str, module: str = "launch.generate") -> list[str]:
    """Return a command that generates a few tokens with the demo model on the devices of three hosts."""
    own = ["--prompt=def add(a, b):\n", "--max_new_tokens=48", "--mesh=sequence=-1", "--compile_cache="]
    return [sys.executable, "-m", module, *own, *arguments]


def commands_of(case: str, host: int, hosts: int, folder: Path) -> list[list[str] | None]:
    """Return the command of each host."""
    shared = [f"--heartbeat_timeout={HEARTBEAT}"]
    shared += [f"--stall_timeout={STALL}"] if case == "stuck" else []
    shared += [f"--initialization_timeout={INITIALIZATION}"] if case == "missing" else []
    if case not in ("flag", "checkpoint", "missing"):
        shared += [f"--fault={case}", f"--fault_host={host}"]
    commands: list[list[str] | None] = [
        generate_command(*shared, module="benchmarks.fault_injection") for _ in range(hosts)
    ]
    if case == "missing":
        commands[host] = None
    elif case == "flag":
        commands[host] = generate_command(*shared, "--steps=32", module="benchmarks.fault_injection")
    elif case == "checkpoint":
        other = folder / "other"
        shutil.copytree(DEMO, other, ignore=shutil.ignore_patterns("*.py", "*.jsonl", "__pycache__"))
        weights = bytearray((other / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (other / "model.safetensors").write_bytes(weights)
        commands[host] = generate_command(*shared, f"--checkpoint={other}", module="benchmarks.fault_injection")
    return commands


def run_case(case: str, host: int, hosts: int = 3) -> Outcome:
    """Run one case: a fault on one host.

    Raises:
      TimeoutError: the hosts do not end.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = commands_of(case, host, hosts, folder)
        start = time.time()
        with HostProcesses(commands, folder) as processes:
            codes = processes.wait(frozen=host if case == "freeze" else None)
            end = time.time()
            logs = processes.text("err")
    at = next((float(found[1]) for log in logs if (found := re.search(r"^FAULT ([\d.]+)$", log, re.MULTILINE))), None)
    if case == "missing":
        at = start + INITIALIZATION
    elif at is None and case not in ("flag", "checkpoint"):
        raise RuntimeError(f"{case} on host {host}: the hosts failed before it:\n" + "\n".join(logs))
    witnesses = [logs[0]] if host != 0 or case not in ("lose", "missing", "freeze") else logs[1:]
    named = all(names_host(log, host) for log in witnesses)
    return Outcome(case, host, hosts, round(end - (at or start), 2), round(end - start, 2), codes, named, logs)


def names_host(log: str, host: int) -> bool:
    """Return whether a host's log names ``host`` as the cause."""
    found = re.search(r"^FAULT_HOSTS ([\d,]+)$", log, re.MULTILINE)
    return found is not None and str(host) in found[1].split(",")


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    define_record_flags(values)
    flags.DEFINE_list("only", list(CASES), "Cases to run.", flag_values=values)
    flags.DEFINE_bool("attacks", False, "Run the attacks of benchmarks.attacks instead.", flag_values=values)
    flags.DEFINE_integer("hosts", 3, "Number of hosts; each is one process with one device.", 2, 8, flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Cause each fault on a run of several hosts and record how it ends; with ``--attacks``, run the attacks instead.

    Raises:
      InputError: ``--only`` names an unknown case.
      RuntimeError: the hosts failed before the fault was caused.
      SystemExit: a command under attack is slower than the goal. The record is written before.
    """
    if values.attacks:
        found = {}
        for name, attack in LONG.items():
            found[name] = attack()
            print(name, json.dumps(found[name]), flush=True)
        record = build_record("faults", kind="measured", settings={"attacks": list(LONG)}, results=found)
        print(write_record(record, values.output_dir, values.record or "attacks"))
        if missed := missed_goals(found):
            sys.exit("\n".join(missed))
        return
    if unknown := set(values.only) - set(CASES):
        raise InputError(f"--only: there is no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    outcomes = []
    for case in values.only:
        for host in (0, 1):
            outcome = run_case(case, host, values.hosts)
            outcomes.append({key: value for key, value in asdict(outcome).items() if key != "logs"})
            code = worst(outcome.survivors)
            named = "named" if outcome.named else "NOT NAMED"
            print(
                f"{case:<11} host {host}  down {outcome.seconds:6.2f} s after it, "
                f"{outcome.from_start:6.2f} s after the start  exit {code}  {named}",
                flush=True,
            )
    settings = {"heartbeat_timeout": HEARTBEAT, "stall_timeout": STALL, "initialization_timeout": INITIALIZATION}
    record = build_record("faults", kind="measured", settings=settings, results=outcomes)
    print(write_record(record, values.output_dir, values.record))


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
