"""Hosts as real processes connected by gloo: the tokens equal those of one process, and errors name the fault."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.faults import CASES, HEARTBEAT, STALL, HostProcesses, generate_command, names_host, run_case
from checkpoints import DEMO
from checkpoints.manifest import MANIFEST_FILE
from launch import convert, generate
from launch.hosts.local_processes import free_port, worst

PROMPTS = ["--prompt=def add(a, b):\n", "--prompt=def is_even(number):\n"]
GENERATE = [*PROMPTS, "--max_new_tokens=16", "--json", "--compile_cache="]
BOUND = 15.0  # maximum seconds from a fault until all processes have ended, with the timeouts of ``run_case``


def local(*command: str, processes: int, devices: int) -> subprocess.CompletedProcess[str]:
    own = [f"--num_processes={processes}", f"--devices_per_process={devices}"]
    return subprocess.run(
        [sys.executable, "-m", "launch.local", *own, "--", sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def tokens(lines: str) -> list[list[int]]:
    return [json.loads(line)["tokens"] for line in lines.splitlines()]


def check_generation(capsys: pytest.CaptureFixture[str], mesh: str, processes: int, devices: int, *more: str) -> None:
    arguments = [*GENERATE, f"--mesh={mesh}", *more]
    generate.run(["generate", *arguments])
    alone = tokens(capsys.readouterr().out)
    done = local("launch.generate", *arguments, processes=processes, devices=devices)
    assert done.returncode == 0, done.stderr
    assert tokens(done.stdout) == alone
    assert f"all devices {processes * devices}" in " ".join(done.stderr.split())


def test_two_processes_give_the_tokens_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    check_generation(capsys, "data=2,tensor=2", 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("mesh", ["tensor=4", "sequence=4", "data=2,sequence=2", "data=4"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_tokens_on_every_mesh(
    capsys: pytest.CaptureFixture[str], mesh: str, processes: int, temperature: float
) -> None:
    check_generation(capsys, mesh, processes, 4 // processes, f"--temperature={temperature}")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_converted_and_restored_together(capsys: pytest.CaptureFixture[str], tmp_path: Path, processes: int) -> None:
    """Several processes write the same checkpoint as one, and generate the same tokens after restoring it."""
    one, many, back = (tmp_path / name for name in ("one", "many", "back"))
    convert.run(["convert", f"--source={DEMO}", f"--output={one}"])
    capsys.readouterr()
    done = local("launch.convert", f"--source={DEMO}", f"--output={many}", processes=processes, devices=1)
    assert done.returncode == 0, done.stderr
    assert (one / MANIFEST_FILE).read_bytes() == (many / MANIFEST_FILE).read_bytes()
    check_generation(capsys, "data=2,tensor=2", processes, 4 // processes, f"--checkpoint={many}")
    done = local("launch.export", f"--checkpoint={many}", f"--output={back}", processes=processes, devices=1)
    assert done.returncode == 0, done.stderr
    assert "host 1 has nothing to do" in done.stderr
    assert done.stdout.strip() == str(back)


@pytest.mark.slow
def test_doctor_on_two_hosts(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    done = local("launch.doctor", "--megabytes=0.5", f"--compile_cache={tmp_path}", processes=2, devices=2)
    assert done.returncode == 0, done.stderr
    for said in ("[0] warning: ", "[1] host 1: warning: "):
        assert f"{said}--compile_cache={tmp_path}: other users can write there" in done.stderr
    assert "4 x cpu (cpu) on 2 host(s)" in done.stdout
    assert "host 1: devices" in done.stdout
    for axis in ("data=2", "tensor=2"):
        assert any(line.startswith(axis) and line.endswith("correct sums") for line in done.stdout.splitlines())


@pytest.mark.slow
def test_under_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*GENERATE, "--mesh=data=2"]
    generate.run(["generate", *arguments])
    alone = tokens(capsys.readouterr().out)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(
        [*command, "-m", "launch.generate", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert tokens(done.stdout) == alone


def check_fault(case: str, host: int) -> None:
    outcome = run_case(case, host)
    code = 2 if case in ("flag", "checkpoint") else 42
    assert set(outcome.survivors) == {code}, outcome.logs
    assert outcome.named, outcome.logs
    # A frozen host does not react to the message about the fault, so the others wait for it before they end.
    bound = STALL + 10 if case == "stuck" else BOUND + 10 if case == "freeze" else BOUND
    assert outcome.seconds <= bound, f"{outcome.seconds} s for {case} on host {host}"
    if case == "exception":
        assert "RuntimeError: the disk is on fire" in outcome.logs[0]
    if case == "stuck":
        assert outcome.logs[0].count("stack traces:") == 3
        assert "fault_injection.py" in outcome.logs[0]
        assert "_sleep" in outcome.logs[0]


@pytest.mark.parametrize(("case", "host"), [("exception", 1), ("flag", 0)])
def test_fault(case: str, host: int) -> None:
    check_fault(case, host)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("host", [0, 1])
def test_every_fault(case: str, host: int) -> None:
    check_fault(case, host)


@pytest.mark.slow
def test_sigterm_while_waiting_for_others_ends_at_once(tmp_path: Path) -> None:
    command = generate_command("--mesh=data=2")
    with HostProcesses([command, None], tmp_path) as processes:
        until_said(processes, 0, "waiting for host 1 of 2")
        processes.send(0, signal.SIGTERM)
        assert processes.wait(15) == [42, None]
        assert "SIGTERM before any work was in flight" in processes.text("err")[0]


def run_with_fault(folder: Path, fault: str, hosts: int, *more: str) -> tuple[list[int | None], list[str], list[str]]:
    command = generate_command(
        f"--fault={fault}",
        "--fault_host=1",
        f"--heartbeat_timeout={HEARTBEAT}",
        *more,
        module="benchmarks.fault_injection",
    )
    with HostProcesses([command] * hosts, folder) as processes:
        return processes.wait(), processes.text("out"), processes.text("err")


@pytest.mark.slow
def test_sigterm_on_one_host_drains_all(tmp_path: Path) -> None:
    codes, out, err = run_with_fault(tmp_path, "drain", 2)
    assert codes == [0, 0], err
    assert out[0].startswith("def add")
    assert out[1] == ""
    assert "SIGTERM: finishing work in flight" in err[1]
    assert ["DRAINED 0" in err[0], "DRAINED 1" in err[1]] == [True, True]


@pytest.mark.slow
def test_ctrl_c_on_one_host_ends_all_with_the_text_so_far(tmp_path: Path) -> None:
    codes, out, err = run_with_fault(tmp_path, "interrupt", 2)
    assert codes == [130, 130], err
    assert out[0].startswith("def add")
    assert out[1] == ""
    assert "host 1" in err[1]
    assert "the text so far follows; a second Ctrl-C stops at once" in err[1]
    assert "stopped by SIGINT: " in err[0]
    assert "new tokens committed, printed up to the first open position" in err[0]


@pytest.mark.slow
def test_a_second_ctrl_c_ends_all_at_once(tmp_path: Path) -> None:
    command = generate_command("--fault=stuck", "--fault_host=1", module="benchmarks.fault_injection")
    with HostProcesses([command] * 2, tmp_path) as processes:
        until_said(processes, 1, "FAULT ")  # host 1 makes no progress any more
        processes.send(1, signal.SIGINT)
        time.sleep(1.0)
        processes.send(1, signal.SIGINT)
        codes, err = processes.wait(60), processes.text("err")
    assert codes == [130, 130], err
    assert "stopped by SIGINT" not in err[0]


def until_said(processes: HostProcesses, host: int, text: str) -> None:
    """Wait until a host has written a text to standard error."""
    deadline = time.monotonic() + 120
    while text not in processes.text("err")[host]:
        assert time.monotonic() < deadline, processes.text("err")
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 42), (signal.SIGINT, 130)])
def test_a_signal_in_a_step_that_does_not_end(number: signal.Signals, code: int, host: int, tmp_path: Path) -> None:
    """Host 0 waits for host 1. Whichever host is told to stop, host 0 prints the text and exits within 5 seconds."""
    command = generate_command("--fault=stuck", "--fault_host=1", module="benchmarks.fault_injection")
    with HostProcesses([command] * 2, tmp_path) as processes:
        until_said(processes, 1, "FAULT ")  # host 1 makes no progress any more
        begun = time.monotonic()
        processes.send(host, number)
        until_said(processes, 0, f"stopped by {number.name}")
        stopped = time.monotonic() - begun
        codes, ended, err = processes.wait(60), time.monotonic() - begun, processes.text("err")
    assert codes == [code, code], err
    assert names_host(err[1], 0)
    assert stopped <= 5  # printing begins after 4, and a busy machine needs some time for it
    assert ended < 30  # without a limit of its own, 240


@pytest.mark.slow
def test_a_second_sigterm_ends_all_at_once(tmp_path: Path) -> None:
    codes, out, err = run_with_fault(tmp_path, "end", 2)
    assert codes == [42, 42], err
    assert out == ["", ""]
    assert all(names_host(log, 1) for log in err)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("drain", 0),
        pytest.param("end", 42, marks=pytest.mark.slow),
        pytest.param("exception", 42, marks=pytest.mark.slow),
    ],
)
def test_a_host_alone(tmp_path: Path, fault: str, code: int) -> None:
    """A single host has the same exit codes and messages as several."""
    # Few tokens, so that they are finished within the grace period after SIGTERM, even on a busy machine.
    more = [f"--fault={fault}", "--max_new_tokens=5"]
    command = generate_command(*more, module="benchmarks.fault_injection")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith("def add") == (code == 0)
    if fault != "exception":
        assert "SIGTERM: finishing work in flight" in done.stderr
        assert ("stopped at once by a second SIGTERM" in done.stderr) == (fault == "end")


@pytest.mark.slow
def test_a_host_alone_that_stands_still_shows_its_stacks() -> None:
    command = generate_command("--fault=stuck", f"--stall_timeout={STALL}", module="benchmarks.fault_injection")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 42
    assert "_sleep" in done.stderr
    assert f"no progress for {STALL} s" in done.stderr


@pytest.mark.slow
def test_prompts_from_the_first_hosts_standard_input() -> None:
    command = [sys.executable, "-m", "launch.local", "--", *generate_command("--mesh=data=2")]
    command = [word for word in command if not word.startswith("--prompt")]
    done = subprocess.run(command, input="def add(a, b):\n", capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def add(a, b):\n")


@pytest.mark.slow
def test_a_wrong_flag_everywhere_is_one_users_error() -> None:
    done = local("launch.generate", "--steps=many", *PROMPTS, processes=2, devices=1)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "steps" in done.stderr
    assert "Traceback" not in done.stderr


class TestLocal:
    """``launch.local`` with arbitrary commands."""

    def run(self, code: str, *own: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "launch.local", "--num_processes=3", *own, "--", sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def test_output(self) -> None:
        code = (
            "import os, sys; n = os.environ['JAX_PROCESS_ID']; print('out', n);"
            "print('err', n, os.environ['JAX_NUM_PROCESSES'], file=sys.stderr)"
        )
        done = self.run(code)
        assert done.returncode == 0
        assert done.stdout == "out 0\n"
        assert sorted(done.stderr.splitlines()) == [
            "[0] err 0 3",
            "[1] err 1 3",
            "[1] out 1",
            "[2] err 2 3",
            "[2] out 2",
        ]

    def test_one_fails_and_the_others_are_killed_with_their_children(self, tmp_path: Path) -> None:
        code = (
            "import os, subprocess, sys, time\n"
            "if os.environ['JAX_PROCESS_ID'] == '1':\n"
            f"    while len(os.listdir('{tmp_path}')) < 2: time.sleep(0.05)\n"
            "    sys.exit(7)\n"
            f"child = subprocess.Popen(['sleep', '600']); open(f'{tmp_path}/{{child.pid}}', 'w')\n"
            "time.sleep(600)\n"
        )
        done = self.run(code, "--grace=1.5")
        assert done.returncode == 7
        assert "killing process 0, 2: another has failed" in done.stderr
        assert "exit codes: 137, 7, 137" in done.stderr
        children = [int(path.name) for path in tmp_path.iterdir()]
        assert len(children) == 2
        for child in children:
            state = Path(f"/proc/{child}/stat")
            assert not state.exists() or state.read_text().split()[2] == "Z"

    def test_signals_are_handed_on(self) -> None:
        code = (
            "import signal, sys, time\n"
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
            "print('ready', flush=True)\ntime.sleep(600)\n"
        )
        command = [sys.executable, "-m", "launch.local", "--num_processes=2", "--", sys.executable, "-c", code]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "ready\n"
            assert process.stderr.readline() == "[1] ready\n"
            process.terminate()
            assert process.wait(30) == 5

    def test_a_signal_while_processes_start_is_handed_on(self) -> None:
        code = (
            "import os, signal, sys\nfrom launch import local\nstart = local.Processes\n"
            "def started(*arguments):\n"
            "    found = start(*arguments)\n    os.kill(os.getpid(), signal.SIGTERM)\n    return found\n"
            "local.Processes = started\n"
            "local.run(['local', '--num_processes=2', '--', sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert "exit codes: 143, 143" in done.stderr
        assert done.returncode == 143

    def test_a_reader_that_goes_away(self, tmp_path: Path) -> None:
        """When the reader closes the pipe (as with `| head -1`), the process must fail, not hang on a full pipe."""
        code = "import os\nif os.environ['JAX_PROCESS_ID'] == '0':\n    while True: print('line' * 100)"
        command = [sys.executable, "-m", "launch.local", "--num_processes=2", "--", sys.executable, "-c", code]
        with (tmp_path / "errors").open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        try:
            assert process.stdout is not None
            process.stdout.readline()
            process.stdout.close()
            assert process.wait(30) == 1
        finally:
            process.kill()
        said = (tmp_path / "errors").read_text()
        assert "[0] BrokenPipeError" in said
        assert "exit codes: 1, 0" in said

    def test_a_slow_reader_gets_everything(self) -> None:
        """The processes have ended long ago, and more is waiting than a pipe holds."""
        code = "for number in range(2100): print(str(number).zfill(50))"
        command = [sys.executable, "-m", "launch.local", "--num_processes=1", "--", sys.executable, "-c", code]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            time.sleep(8)
            lines = [first, *process.stdout]
        assert len(lines) == 2100
        assert process.returncode == 0

    def test_a_reader_that_hangs_does_not_stop_a_signal(self) -> None:
        """More is waiting than all pipes hold, and nobody reads it."""
        code = "for number in range(200000): print(str(number).zfill(50), flush=True)"
        command = [sys.executable, "-m", "launch.local", "--num_processes=1", "--", sys.executable, "-c", code]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.terminate()
            assert process.wait(30) == 143

    def test_mistakes(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "launch.local"], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2
        assert "no command" in done.stderr


def test_free_ports_are_none_that_the_system_gives_away(monkeypatch: pytest.MonkeyPatch) -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port() for _ in range(50)]
    assert max(ports) + 1 < first
    half_taken, free = list(dict.fromkeys(ports))[:2]
    draws = iter([(port - 20000) // 2 for port in (half_taken, free)])
    monkeypatch.setattr("launch.hosts.local_processes.secrets.randbelow", lambda count: next(draws))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", half_taken + 1))
        assert free_port() == free


@pytest.mark.parametrize(
    ("codes", "code"), [([0, 0], 0), ([0, 42], 42), ([42, 2], 2), ([42, 137], 137), ([1, 2, 42], 2)]
)
def test_the_worst_exit_code(codes: Sequence[int], code: int) -> None:
    assert worst(codes) == code
