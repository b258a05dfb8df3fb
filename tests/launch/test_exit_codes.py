"""Exit code 2 for errors that a user can fix, with one message; 42 for errors that a restart may fix."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

from checkpoints import replace_file
from launch import generate
from launch.folders.listing import print_names
from launch.hosts.place import Place, check_coordinator_port
from launch.process import startup
from launch.process.profiling import write_programs
from launch.process.startup import run_launcher
from launch.serving.errors import ApiError
from launch.serving.http import HttpServer, listen
from launch.serving.limits import Limits
from sharding.errors import InputError


def ends(error: Exception, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Return the exit code and standard error of a command that ends with an error."""

    def main(values: flags.FlagValues) -> None:
        raise error

    with pytest.raises(SystemExit) as stop:
        run_launcher(main, lambda values: None, "", ["launcher"])
    return stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EACCES", "EROFS", "ENOENT", "EISDIR", "EFBIG", "EADDRINUSE"])
def test_files_and_ports_are_the_users(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    number = getattr(errno, code)
    assert ends(OSError(number, os.strerror(number), "/x/y"), capsys) == (2, f"error: /x/y: {os.strerror(number)}\n")


def test_what_a_restart_may_cure(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (OSError(errno.ECONNRESET, "x"), OSError("x"), RuntimeError("x"), ApiError(400, "x")):
        code, said = ends(error, capsys)
        assert code == 42
        assert "Traceback" in said


def test_messages_show_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(InputError("a\x1b[2Jb"), capsys) == (2, "error: a\\x1b[2Jb\n")


def test_texts_from_outside_show_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ends(RuntimeError("a\x1b[2Jb\x9b"), capsys)
    assert code == 42
    assert said.endswith("RuntimeError: a\\x1b[2Jb\\x9b\n")
    startup.say("the weights' licence, LICENSE\x07: \x1b]0;x\x07 é\ttext")
    assert capsys.readouterr().err == "the weights' licence, LICENSE\\x07: \\x1b]0;x\\x07 é\ttext\n"
    print_names([("a\x1b[2J", "float32", (1,))])
    assert capsys.readouterr().out == "a\\x1b[2J  float32 [1]\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/x"), "/tmp/x: No space left on device"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory"), "No usable temporary directory"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), None),
    ],
)
def test_errors_before_hosts_join(
    error: OSError, said: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def join(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(startup, "join", join)
    command = ["launcher", "--coordinator_address=127.0.0.1:1", "--num_processes=2", "--process_id=0"]
    with pytest.raises(SystemExit) as stop:
        run_launcher(lambda values: None, startup.define_device_flags, "", command)
    shown = capsys.readouterr().err
    if said is None:
        assert stop.value.code == 42
        assert shown.startswith("Traceback")
    else:
        assert (stop.value.code, shown) == (2, f"error: {said}\n")


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    values = flags.FlagValues()
    flags.DEFINE_string("dump_hlo", str(tmp_path), "", flag_values=values)
    values(["launcher"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as page:
            replace_file(tmp_path / "page.html", [b"x" * 2048])
        with pytest.raises(OSError, match="File too large") as program:
            write_programs(values, {"step": "x" * 2048})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert page.value.filename == str(tmp_path / "page.html")
    assert program.value.filename == str(tmp_path / "step.hlo.txt")
    assert not list(tmp_path.iterdir())


def test_jit_that_is_disabled() -> None:
    command = [sys.executable, "-m", "launch.main", "generate", "--prompt=x", "--max_new_tokens=4"]
    env = os.environ | {"JAX_DISABLE_JIT": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: JAX_DISABLE_JIT is set")


@pytest.mark.parametrize("setting", ["JAX_DISABLE_JIT=maybe", "JAX_NUM_CPU_DEVICES=two"])
def test_variables_that_jax_does_not_take(setting: str) -> None:
    name, _, value = setting.partition("=")
    command = [sys.executable, "-m", "launch.main", "generate", "--prompt=x"]
    env = os.environ | {name: value}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {name}={value!r} in the environment: JAX does not take this value; correct or unset it\n"
    )


PRINTS = """
from launch.process.startup import run_launcher
run_launcher(lambda values: print("result" * {count}), lambda values: None, "help", {arguments})
"""


@pytest.mark.parametrize(("count", "arguments"), [(1, ["x"]), (100_000, ["x"]), (1, ["x", "--help"])])
def test_standard_output_that_is_full(count: int, arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        code = PRINTS.format(count=count, arguments=arguments)
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output")
    assert done.stderr.endswith(": No space left on device\n")
    assert done.stderr.count("\n") == 1


STREAMS = """
import os, sys
from launch.process.startup import run_launcher
def main(values):
    print("result")
    print("message", file=sys.stderr, flush=True)
    os.fstat(1)
    {work}
run_launcher(main, lambda values: None, "help", ["x"])
"""


@pytest.mark.parametrize(
    ("redirected", "work", "expected"),
    [
        (">&-", "pass", 0),
        (">&-", "raise FileNotFoundError(2, 'x')", 2),
        (">/dev/full", "1 / 0", 42),
        ("2>/dev/full", "pass", 0),
        ("2>/dev/full", "raise FileNotFoundError(2, 'x')", 2),
        ("2>/dev/full", "1 / 0", 42),
        ("<&- >&- 2>&-", "sys.stdin.read()", 0),
    ],
)
def test_standard_streams_that_are_closed_or_full(redirected: str, work: str, expected: int) -> None:
    command = ["/bin/sh", "-c", f'"$0" -c "$1" {redirected}', sys.executable, STREAMS.format(work=work)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    assert subprocess.run(command, capture_output=True, env=env, check=False, timeout=120).returncode == expected


STILL_COMPILING = """
import atexit, sys, threading
from launch.process.startup import run_launcher
from launch.serving.compilation import Compilation
from runtime import Bucket, Programs
class Devices:
    later, cached_programs, pools = [], 0, []
    def compile(self, programs):
        started.set()
        threading.Event().wait()
class Finalized:
    def __del__(self):
        print("finalized", flush=True)
started, held = threading.Event(), Finalized()
def main(values):
    atexit.register(print, "cleaned up")
    compilation = Compilation(Devices())
    compilation.begin(Programs(0, Bucket(1, 64)))
    started.wait()
    print("result")
    try:
        {work}
    finally:
        compilation.stop(0.01)
run_launcher(main, lambda values: None, "help", ["x"])
"""


@pytest.mark.parametrize(("work", "expected"), [("pass", 0), ("sys.exit(42)", 42), ("1 / 0", 42)])
def test_a_compiler_that_does_not_end(work: str, expected: int) -> None:
    """Python is not finalized, because C++ code aborts the process when it returns to a thread of Python after that."""
    code = STILL_COMPILING.format(work=work)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (expected, "result\ncleaned up\n")
    assert ("ZeroDivisionError" in done.stderr) == (work == "1 / 0")


def test_a_compiler_outside_of_a_command_changes_no_exit_code() -> None:
    code = STILL_COMPILING.format(work="pass").replace("run_launcher(main,", "main(None); run_launcher(print,")
    code += "sys.exit(3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 3, done.stderr


def test_a_table_that_nobody_reads() -> None:
    """As everywhere else, it is no error that the reader of a pipe has gone."""
    command = f"{sys.executable} -m launch.main models | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", ["--help >/dev/full", "nothing 2>/dev/full"])
def test_the_console_command_with_full_streams(arguments: str) -> None:
    command = ["/bin/sh", "-c", f'"$0" -m launch.main {arguments}', sys.executable]
    assert subprocess.run(command, capture_output=True, check=False, timeout=120).returncode == 2


@pytest.mark.slow
def test_a_page_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    flags_of_run = ["--prompt=def f(x):", "--max_new_tokens=4", "--mesh=tensor=1"]
    for more in ("--history_html=/proc/page.html", "--dump_hlo=/proc/programs"):
        with pytest.raises(SystemExit) as stop:
            generate.run(["generate", *flags_of_run, more])
        assert stop.value.code == 2
        assert "Traceback" not in capsys.readouterr().err


def test_a_port_that_somebody_else_listens_on_by_now() -> None:
    async def app(*arguments: object) -> None:
        """Fail: no request is expected."""

    one = listen("127.0.0.1", 0)
    other = listen("127.0.0.1", one.getsockname()[1])
    one.listen()
    with pytest.raises(InputError, match=r"cannot listen there \(Address already in use\)"):
        HttpServer(app, other, Limits()).start()
    one.close()
    other.close()


def test_a_coordinator_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match="--coordinator_port"):
            check_coordinator_port(Place(0, 2, f"127.0.0.1:{port}", port + 1, "127.0.0.1"))
    check_coordinator_port(Place(0, 2, f"127.0.0.1:{port}", port + 1, "127.0.0.1"))


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_local_with_a_full_standard_output(unbuffered: str) -> None:
    command = [sys.executable, "-m", "launch.local", "--num_processes=1", "--", sys.executable, "-c", "print('x' * 99)"]
    with open("/dev/full", "w") as full:
        env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=env, check=False, timeout=120
        )
    assert (done.returncode, done.stderr) == (2, "error: standard output: No space left on device\n")


@pytest.mark.parametrize(("code", "expected"), [(42, 42), (2, 2), (137, 137)])
def test_local_with_a_frozen_process(code: int, expected: int, tmp_path: Path) -> None:
    """A stopped process that must be killed is reported as such, and not with exit code 137 like a lack of memory."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys\n"
        "if os.environ['JAX_PROCESS_ID'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        f"sys.exit({code})\n"
    )
    command = [sys.executable, "-m", "launch.local", "--num_processes=2", "--grace=0.3", "--"]
    done = subprocess.run(
        [*command, sys.executable, str(program)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == expected, done.stderr
    assert "killing process 1" in done.stderr
