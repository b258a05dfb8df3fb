"""Start-up and shutdown of every command: flags, exit codes, hosts, devices, compile cache, progress."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import NoReturn, Self

from absl import flags
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from launch.hosts.faults import EXIT_INTERRUPTED, EXIT_RESTART, EXIT_USER_ERROR, Timeouts
from launch.hosts.host import Host, join
from launch.hosts.place import define_place_flags, find_place
from launch.process.compile_cache import drop_unusable, private_folder
from launch.process.ending import begin_output, end_output
from launch.process.streams import drop_output, flush_output, tell
from runtime import InputError

MAX_SIMULATED_DEVICES = 4096
# Less than 10 s, so that a line is there at least that often.
SECONDS_BETWEEN_LINES = 9.0
# Less than the grace period of launch/cluster/gke, after which a process is killed.
SECONDS_TO_END = 240.0

# A progress report: called with (done, total).
Report = Callable[[int, int], None]

# Errors of files and ports that a restart cannot fix.
_OF_USERS = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.EADDRINUSE, errno.EADDRNOTAVAIL),
)

_host = Host()


def this_host() -> Host:
    """Return the object for the host that this command runs on."""
    return _host


def version() -> str:
    """Return the installed version of diffumesh."""
    try:
        return metadata.version("diffumesh")
    except metadata.PackageNotFoundError:
        return "0+uninstalled"


def run_launcher(
    main: Callable[[flags.FlagValues], None],
    define: Callable[[flags.FlagValues], None],
    doc: str,
    argv: Sequence[str] | None = None,
    first: Sequence[str] = (),
) -> None:
    """Parse flags and run a command, on one host or as one of several.

    Exits with 2 and a message on standard error for errors that the user can fix, with 42 for all other errors.

    Args:
      main: the command's function, called with its flags.
      define: defines the flags. Each command has its own set, so that importing one defines nothing. A command that
        defines :func:`define_device_flags` runs on all hosts together. One that defines only
        :func:`define_place_flags` runs on host 0, and the other hosts exit. Any other runs on its own wherever it is
        started.
      doc: the text of ``--help`` before the flags.
      argv: command line, program name first; default ``sys.argv``.
      first: the flags that ``--help`` shows, in this order, while ``--helpfull`` shows all. If empty, both show all.
    """
    begin_output()
    ProgressLines.latest = time.monotonic()
    argv = list(sys.argv if argv is None else argv)
    # transformers is used for its tokenizers only: its warning that PyTorch is missing does not matter.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    values = flags.FlagValues()
    define(values)
    if _print_help(values, doc, argv[1:], first):
        return
    global _host
    together = "devices" in values and "coordinator_address" in values
    try:
        _host = _find_host(argv, together) if "coordinator_address" in values else Host()
        if not together and _host.process_index > 0:
            print(
                f"host {_host.process_index} has nothing to do: host 0 runs this command; --num_processes=1 runs it "
                "here",
                file=sys.stderr,
            )
            return
        with _host if together else contextlib.nullcontext():
            rest = values(argv)
            if len(rest) > 1:
                raise InputError(f'"{rest[1]}" is not a flag; {_meant(values, rest[1])}see --help')
            main(values)
            sys.stdout.flush()
            _host.finish()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of the pipe is gone, so nothing more can be printed.
        drop_output()
        sys.exit(0)
    except Exception as error:
        _end_with(error)
    finally:
        end_output()
        _host = Host()


def _meant(values: flags.FlagValues, text: str) -> str:
    """Return the flag that an argument without one may be meant for, as the beginning of a sentence."""
    names = ("source", "checkpoint") if os.path.exists(text) else ("prompt", "source", "checkpoint")
    found = next((name for name in names if name in values), None)
    return f"did you mean --{found}={shlex.quote(text)}? " if found else ""


def _end_with(error: Exception) -> NoReturn:
    """Report an uncaught error to all hosts, print it, and exit with 2 or 42."""
    flush_output()
    if (message := _message_to_user(error)) is not None:
        _host.fail(error if isinstance(error, InputError) else InputError(message))
        fail(message)
    _host.fail(error)
    _end_with_traceback(error)


def _end_with_traceback(error: Exception) -> NoReturn:
    tell("".join(traceback.format_exception(error)).rstrip())
    sys.exit(EXIT_RESTART)


def _message_to_user(error: Exception) -> str | None:
    """Return the message for an error that the user can fix and a restart cannot; None for other errors."""
    if isinstance(error, flags.UnrecognizedFlagError):
        from runtime import DiffusionConfig, declared_parameters

        own = [one.name for one in declared_parameters(DiffusionConfig) if error.flagname in one.aliases]
        return f"--{error.flagname} is not a flag; did you mean --{own[0]}?" if own else str(error)
    if isinstance(error, (InputError, flags.Error)):
        return str(error)
    if isinstance(error, RuntimeError) and "not in the list of known backends" in str(error):
        return f"JAX_PLATFORMS: {error}"
    if isinstance(error, OSError) and error.errno in _OF_USERS:
        why = os.strerror(error.errno)
        if error.filename is None and error.strerror not in (None, why):
            return error.strerror  # a library's own message
        return f"{'standard output or a file' if error.filename is None else error.filename}: {why}"
    return None


def _print_help(values: flags.FlagValues, doc: str, arguments: Sequence[str], first: Sequence[str]) -> bool:
    """Print the help or the version if an argument asks for it. Returns whether one did."""
    if {"--help", "-help", "-h", "--helpfull"} & set(arguments):
        shown = _first_flags(values, first) if first and "--helpfull" not in arguments else _all_flags(values)
        text = f"{doc.strip()}\n\nFlags:\n{shown}"
    elif "--version" in arguments:
        text = f"diffumesh {version()}"
    else:
        return False
    try:
        print(text, flush=True)
    except BrokenPipeError:
        drop_output()
    except OSError as error:
        fail(f"standard output: {error.strerror}")
    return True


def _all_flags(values: flags.FlagValues) -> str:
    """Help of every flag, grouped by the module that defines it."""
    return values.get_help().partition("\n")[2]


def _first_flags(values: flags.FlagValues, first: Sequence[str]) -> str:
    """Help of the flags that people need first, and the number of the others."""
    lines = []
    for name in first:
        alone = flags.FlagValues()
        alone[name] = values[name]
        lines.append(alone.get_help(prefix="  ", include_special_flags=False))
    return "\n".join([*lines, "", f"{len(values) - len(first)} more flags: --helpfull"])


def _find_host(argv: Sequence[str], together: bool) -> Host:
    """Find out which host this is, and join the others if the command runs on all hosts together.

    Only the flags that describe the cluster are read here. If another flag is wrong, all hosts must be told, so it is
    parsed after joining. Exits with 2 if these flags are wrong or for another error that the user can fix, and with 42
    if the cluster does not answer.
    """
    values = flags.FlagValues()
    define_device_flags(values)
    try:
        values(list(argv), known_only=True)
        place = find_place(values)
        if together and place.hosts > 1:
            waits = ("initialization_timeout", "heartbeat_timeout", "shutdown_timeout", "stall_timeout")
            return join(place, Timeouts(*(values[name].value for name in waits)))
    except Exception as error:
        if (message := _message_to_user(error)) is not None:
            fail(message)
        _end_with_traceback(error)  # the cluster may answer later
    host = Host(values.stall_timeout)
    host.process_index = place.host
    return host


def fail(message: str) -> NoReturn:
    """Print an error that the user can fix, and exit with 2."""
    tell(f"error: {message}")
    flush_output()
    sys.exit(EXIT_USER_ERROR)


def define_device_flags(values: flags.FlagValues) -> None:
    """Define the flags for devices, the compile cache and several hosts."""
    define_place_flags(values)
    flags.DEFINE_integer(
        "devices",
        None,
        "Simulate this many CPU devices instead of using the attached devices.",
        lower_bound=1,
        upper_bound=MAX_SIMULATED_DEVICES,
        flag_values=values,
    )
    flags.DEFINE_string(
        "compile_cache",
        str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "diffumesh" / "compiled"),
        "Private folder that keeps compiled programs between runs; several hosts may share it. Empty for none.",
        flag_values=values,
    )


def start_devices(
    values: flags.FlagValues, inputs: Mapping[str, str] | None = None, *, end_within: float | None = None
) -> None:
    """Configure JAX as the flags of :func:`define_device_flags` say, and compare all hosts.

    Call this before the first device is used.

    Args:
      values: the flags.
      inputs: digests of the inputs by name; they must be the same on all hosts.
      end_within: seconds that the process may run after SIGTERM, even if something hangs; default
        :data:`SECONDS_TO_END`.

    Raises:
      InputError: hosts differ, jit is disabled, ``JAX_PLATFORMS`` names what is not there, or the compile cache is not
        a folder.
    """
    import jax

    from launch.hosts import preflight
    from launch.process.environment import check_platforms, describe_absent_tpu

    if jax.config.values["jax_disable_jit"]:
        raise InputError("JAX_DISABLE_JIT is set, but programs are compiled ahead of time: unset it")
    if "://" in values.compile_cache:
        raise InputError(
            f"--compile_cache={values.compile_cache}: expected a folder. Hosts may share one, such as a bucket that is "
            "mounted on each of them: host 0 writes it, and all read it"
        )

    describe_absent_tpu()
    if values.devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", values.devices)
    check_platforms()
    folder = private_folder(values.compile_cache, _host) if values.compile_cache else None
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if _host.count > 1:
        # With asynchronous dispatch, CPU devices may run independent programs in different orders on different hosts.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    _host.end_within(SECONDS_TO_END if end_within is None else end_within)
    _host.mark()
    with ProgressLines("starting devices", of_bytes=False):
        preflight.check(
            _host, values, inputs or {}, lambda table: preflight.print_table(table) if is_main_process() else None
        )
    if _host.count > 1:
        drop_unusable(folder, _host)


def compile_only() -> None:
    """Keep JAX from looking for accelerators: this process only compiles for AOT topologies.

    Call this before the first device is used.
    """
    import jax

    from runtime import AOT_ENVIRONMENT

    os.environ.update(AOT_ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")


def is_main_process() -> bool:
    """Whether this process is on host 0, which prints."""
    return _host.process_index == 0


def say(message: str) -> None:
    """Print a message on standard error, on host 0 only. Control characters in it are escaped."""
    if is_main_process():
        tell(message)


@contextlib.contextmanager
def progress_bar(title: str, *, of_bytes: bool = False) -> Iterator[Report]:
    """Show a progress bar on an interactive terminal, and print a line at least every 10 seconds elsewhere.

    Yields:
      The function to report progress to. Only host 0 shows it, but all hosts report, so that they run the same programs
      between two reports.
    """
    host = _host
    if not sys.stderr.isatty() or not is_main_process():
        with ProgressLines(title, of_bytes) as lines:

            def report_lines(done: int, total: int) -> None:
                host.mark()
                lines.done, lines.total = done, total

            yield report_lines
        return
    amount = (DownloadColumn(), TransferSpeedColumn()) if of_bytes else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *amount, TimeElapsedColumn(), TimeRemainingColumn())
    # Standard output stays what it is: an interruption may print results while the bar is shown.
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as progress:
        task = progress.add_task(title, total=None)

        def report(done: int, total: int) -> None:
            host.mark()
            progress.update(task, completed=done, total=total)

        yield report


class ProgressLines:
    """Prints lines of progress at intervals on host 0, for logs that cannot show a bar.

    Attributes:
      latest: when the latest line of any phase was printed; first, when the command began. A phase that follows a short
        one therefore prints its first line early.
      done, total: the last report.
    """

    latest = time.monotonic()

    def __init__(self, title: str, of_bytes: bool) -> None:
        self._title, self._of_bytes = title, of_bytes
        self._start = time.monotonic()
        self._over = threading.Event()
        self.done = self.total = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self.speak, name="progress", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def speak(self) -> None:
        """Print lines until the phase is over. This runs in a thread."""
        while not self._over.wait(max(0.0, ProgressLines.latest + SECONDS_BETWEEN_LINES - time.monotonic())):
            say(self._line(max(time.monotonic() - self._start, 1e-9)))
            ProgressLines.latest = time.monotonic()

    def _line(self, seconds: float) -> str:
        done, total = self.done, self.total
        if not total:  # nothing is reported yet
            return f"{self._title}: {timedelta(seconds=round(seconds))}"
        left = f", about {timedelta(seconds=round((total - done) * seconds / done))} left" if done else ""
        if self._of_bytes:
            rate = f"{done / seconds / 1e6:.0f} MB/s"
            return f"{self._title}: {done / 1e9:.2f} of {total / 1e9:.2f} GB, {rate}{left}"
        return f"{self._title}: {done} of {total}, {timedelta(seconds=round(seconds))}{left}"
