"""``tpu-vm.sh`` on a slice that is simulated: processes of this machine, behind a ``gcloud`` that is a script."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

CLUSTER = Path(__file__).parent.parent.parent / "launch" / "cluster"
REPOSITORY = CLUSTER.parent.parent

FAKE_GCLOUD = """#!/usr/bin/env bash
# gcloud ... ssh NAME --worker=W --command=...: the command on one or all of HOSTS hosts that are all this machine. The
# connections of the calls with the numbers in DROPS are lost after a while, and so is gcloud's second attempt, which
# runs the command again; that of the calls in RETRIED is not.
exec 9>> "$FAKE/lock"; flock 9
printf '%q ' "$@" >> "$FAKE/calls"; echo >> "$FAKE/calls"
call=$(wc -l < "$FAKE/calls")
exec 9>&-
for argument in "$@"; do
  [[ $argument == --command=* ]] && command=${argument#--command=}
  [[ $argument == --worker=* ]] && worker=${argument#--worker=}
done
[[ " ${DROPS:-} ${RETRIED:-} " == *" $call "* ]] && dropped="timeout ${DROP_SECONDS:-1.5}"
attempt() {
  for ((host = 0; host < HOSTS; host++)); do
    [[ $worker == all || $worker == "$host" ]] || continue
    FAKE_HOST=worker-$host JAX_PROCESS_ID=$host JAX_NUM_PROCESSES=$HOSTS ${dropped:-} bash -c "$command" &
  done
  wait
}
attempt
[[ -n ${dropped:-} ]] || exit 0
[[ " ${RETRIED:-} " == *" $call "* ]] && dropped=
attempt
[[ -z $dropped ]] || exit 255
"""


@pytest.fixture
def slice_of_two(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which gcloud is a script that simulates a slice of two hosts."""
    from launch.hosts.local_processes import free_port

    programs = {
        "bin/gcloud": FAKE_GCLOUD,
        "bin/hostname": '#!/bin/sh\necho "${FAKE_HOST:-here}"\n',
        "home/diffumesh/bin/diffumesh": f'#!/bin/sh\nexec {sys.executable} -m launch.main "$@"\n',
    }
    for name, text in programs.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),
        "FAKE": str(tmp_path),
        "HOSTS": "2",
        "TPU_NAME": "slice",
        "ZONE": "zone",
        "LOG": str(tmp_path / "log"),
        "RECONNECT_SECONDS": "0",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(REPOSITORY),
    }


def tpu_vm(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [CLUSTER / "tpu-vm.sh", *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False, cwd=REPOSITORY
    )


def test_tpu_vm_wrapper_on_a_slice_that_is_played(slice_of_two: dict[str, str], tmp_path: Path) -> None:
    flags = ['--prompt=it\'s "odd"; $HOME', "--mesh=data=2", "--max_new_tokens=4", "--json", "--compile_cache="]
    done = tpu_vm(slice_of_two, "run", "generate", *flags)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["prompt"] == 'it\'s "odd"; $HOME'
    assert "[worker-0]" in done.stderr
    log = (tmp_path / "log").read_text()
    assert "exit [worker-0] 0" in log
    assert "exit [worker-1] 0" in log


def test_tpu_vm_wrapper_gives_all_hosts_one_secret(slice_of_two: dict[str, str], tmp_path: Path) -> None:
    home = Path(slice_of_two["HOME"])
    wheel = tmp_path / "diffumesh-1.whl"
    wheel.touch()
    played = '[[ $4 == scp ]] && { cp "$5" "$HOME/"; exit; }\n'
    gcloud = tmp_path / "bin" / "gcloud"
    gcloud.write_text(FAKE_GCLOUD.replace("for argument", f"{played}for argument", 1))
    (tmp_path / "bin" / "python3").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "python3").chmod(0o755)
    program = home / "diffumesh" / "bin" / "diffumesh"
    program.write_text('#!/bin/sh\ncat "$DIFFUMESH_HOSTS_SECRET_FILE"; echo\n')
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    slice_of_two["TMPDIR"] = str(temporary)
    assert tpu_vm(slice_of_two, "setup", str(wheel)).returncode == 0
    made = home / "diffumesh-hosts.secret"
    assert re.fullmatch(r"[0-9a-f]{64}", made.read_text())
    assert made.stat().st_mode & 0o777 == 0o600
    assert tpu_vm(slice_of_two, "run", "doctor").stdout.split() == [made.read_text()] * 2
    assert tpu_vm(slice_of_two, "setup", str(wheel)).returncode == 0
    calls = [call for call in (tmp_path / "calls").read_text().splitlines() if call.split()[3] == "scp"]
    copied = [word for call in calls for word in shlex.split(call) if word.startswith(f"{temporary}/")]
    assert len(copied) == 2, "each setup copies a secret from a temporary folder"
    assert not list(temporary.iterdir()), "no copy is left"


def test_tpu_vm_wrapper_hands_on_the_worst_code_and_restarts(slice_of_two: dict[str, str], tmp_path: Path) -> None:
    program = Path(slice_of_two["HOME"]) / "diffumesh" / "bin" / "diffumesh"
    program.write_text('#!/bin/sh\n[ "$FAKE_HOST" = worker-1 ] && exit 2\nexit 42\n')
    assert tpu_vm(slice_of_two, "run", "doctor").returncode == 2
    program.write_text('#!/bin/sh\n[ -e "$FAKE/tried" ] && exit 0\nsleep 0.3; touch "$FAKE/tried"; exit 42\n')
    (tmp_path / "calls").unlink()
    done = tpu_vm(slice_of_two, "run", "doctor")
    assert done.returncode == 0
    assert "restart 1 of 5" in done.stderr
    assert len((tmp_path / "calls").read_text().splitlines()) >= 2
    program.write_text("#!/bin/sh\nexit 42\n")
    assert tpu_vm(slice_of_two | {"MAX_RESTARTS": "2"}, "run", "doctor").returncode == 42


def test_tpu_vm_wrapper_does_not_restart_what_was_stopped(slice_of_two: dict[str, str], tmp_path: Path) -> None:
    """A drained batch exits with 42 as after a preemption, but ``stop`` must prevent the restart."""
    program = Path(slice_of_two["HOME"]) / "diffumesh" / "bin" / "diffumesh"
    program.write_text(
        '#!/bin/sh\ntrap "exit 42" TERM\necho $$ > "$FAKE/pid-$FAKE_HOST"\nfor i in $(seq 300); do sleep 0.1; done\n'
    )
    pkill = tmp_path / "bin" / "pkill"
    pkill.write_text('#!/bin/sh\nkill "$(cat "$FAKE/pid-$FAKE_HOST")"\n')
    pkill.chmod(0o755)
    command = [CLUSTER / "tpu-vm.sh", "run", "batch"]
    with subprocess.Popen(command, env=slice_of_two, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True) as running:
        while len(list(tmp_path.glob("pid-*"))) < 2 and running.poll() is None:
            time.sleep(0.05)
        assert tpu_vm(slice_of_two, "stop").returncode == 0
        said = running.communicate(timeout=30)[1]
    assert running.returncode == 42
    assert "stopped: not started again" in said
    program.write_text('#!/bin/sh\n[ -e "$FAKE/tried" ] && exit 0\nsleep 0.3; touch "$FAKE/tried"; exit 42\n')
    done = tpu_vm(slice_of_two, "run", "batch")
    assert "restart 1 of 5" in done.stderr, "the next run is another one"
    assert done.returncode == 0


WAITS = """#!/bin/sh
trap "exit 42" TERM
echo "working on $FAKE_HOST"
echo $$ > "$FAKE/pid-$FAKE_HOST"
for i in $(seq 600); do sleep 0.1; done
"""


def write_program(environment: dict[str, str], text: str) -> None:
    (Path(environment["HOME"]) / "diffumesh" / "bin" / "diffumesh").write_text(text)


def test_tpu_vm_wrapper_outlives_lost_connections(slice_of_two: dict[str, str], tmp_path: Path) -> None:
    """Connections are lost while the command starts, and twice while it runs. It runs once, and no line is lost."""
    write_program(
        slice_of_two,
        """#!/bin/sh
echo started >> "$FAKE/starts-$FAKE_HOST"
for i in $(seq 30); do echo "$FAKE_HOST $i"; echo "noise $i" >&2; sleep 0.15; done
echo "$@"
[ "$FAKE_HOST" = worker-1 ] && exit 3
exit 0
""",
    )
    drops = {"DROPS": "2 4 5 6", "RETRIED": "7", "DROP_SECONDS": "0.8"}
    done = tpu_vm(slice_of_two | drops, "run", "batch", "--prompt=it's; $HOME")
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("connecting again") >= 3
    assert len((tmp_path / "calls").read_text().splitlines()) >= 6
    kept = (tmp_path / "log").read_text().splitlines()
    for host in ("worker-0", "worker-1"):
        assert (tmp_path / f"starts-{host}").read_text() == "started\n"
        lines = [f"{host} {number}" for number in range(1, 31)]
        assert [line for line in done.stdout.splitlines() if line.startswith(host)] == lines
        own = [line for line in kept if f"[{host}]" in line]
        assert [line for line in own if line.startswith("out ")] == [
            f"out [{host}] {line}" for line in [*lines, "batch --prompt=it's; $HOME"]
        ]
        assert [line for line in own if line.startswith("log ")] == [
            f"log [{host}] noise {number}" for number in range(1, 31)
        ]
        assert own[-1] == f"exit [{host}] {3 if host == 'worker-1' else 0}"


def test_tpu_vm_wrapper_keeps_lines_whole(slice_of_two: dict[str, str], tmp_path: Path) -> None:
    """Long lines of one host come in pieces, between which there may be lines of another."""
    write_program(
        slice_of_two,
        """#!/bin/bash
[ "$FAKE_HOST" = worker-1 ] && { for i in $(seq 30); do echo "line $i" >&2; sleep 0.1; done; exit 3; }
printf -v text '%3000s' ''
for i in $(seq 300); do echo "{\\"n\\": $i, \\"text\\": \\"$text\\"}"; sleep 0.005; done
""",
    )
    done = tpu_vm(slice_of_two, "run", "generate")
    assert done.returncode == 3, done.stderr
    assert [json.loads(line)["n"] for line in done.stdout.splitlines()] == list(range(1, 301))
    said = [line for line in done.stderr.splitlines() if "line" in line]
    assert said == [f"[worker-1] line {number}" for number in range(1, 31)]
    # The end of a host's run is a line of its own.
    log = tmp_path / "log"
    assert log.read_text().count("exit [worker-") == 2


def test_tpu_vm_wrapper_runs_one_command_at_a_time(slice_of_two: dict[str, str], tmp_path: Path) -> None:
    """Another run is refused. One whose script has ended goes on, can be followed, and is stopped like any other."""
    write_program(slice_of_two, WAITS)
    pkill = tmp_path / "bin" / "pkill"
    pkill.write_text('#!/bin/sh\nkill "$(cat "$FAKE/pid-$FAKE_HOST")"\n')
    pkill.chmod(0o755)
    assert tpu_vm(slice_of_two, "follow").returncode == 2
    script = CLUSTER / "tpu-vm.sh"
    options: dict[str, Any] = {"env": slice_of_two, "cwd": REPOSITORY, "text": True, "start_new_session": True}
    # A file and not a pipe: what plays gcloud's connections outlives the script, and would keep a pipe open.
    said = tmp_path / "said"
    # Tests that run in the background of a shell ignore SIGINT, and so would the script.
    run = ["env", "--default-signal=INT", script, "run", "batch"]
    with said.open("w") as file, subprocess.Popen(run, stderr=file, **options) as first:
        while len(list(tmp_path.glob("pid-*"))) < 2 and first.poll() is None:
            time.sleep(0.05)
        refused = tpu_vm(slice_of_two, "run", "doctor")
        assert refused.returncode == 2
        assert "error: a run is under way on worker-0 worker-1" in refused.stderr
        os.killpg(first.pid, signal.SIGINT)
        first.wait(timeout=60)
    assert first.returncode == 130
    assert "the run goes on" in said.read_text()
    with subprocess.Popen([script, "follow"], stdout=subprocess.PIPE, **options) as second:
        assert tpu_vm(slice_of_two, "stop").returncode == 0
        printed = second.communicate(timeout=60)[0]
    assert second.returncode == 42
    assert sorted(printed.splitlines()) == ["working on worker-0", "working on worker-1"]
    write_program(slice_of_two, "#!/bin/sh\nexit 0\n")
    assert tpu_vm(slice_of_two, "run", "doctor").returncode == 0


def test_tpu_vm_wrapper_gives_up_on_hosts_and_on_runs_that_are_gone(slice_of_two: dict[str, str]) -> None:
    write_program(slice_of_two, "#!/bin/sh\nsleep 2\n")
    away = {"DROPS": " ".join(map(str, range(3, 99))), "DROP_SECONDS": "0.01", "RECONNECTS": "2"}
    done = tpu_vm(slice_of_two | away, "run", "doctor")
    assert done.returncode == 255
    assert "the run may go on: `follow` shows it" in done.stderr
    assert tpu_vm(slice_of_two, "follow").returncode == 0
    # Everything that belongs to the run is killed, as if the host had started again.
    write_program(slice_of_two, "#!/bin/sh\nkill -9 0\n")
    done = tpu_vm(slice_of_two | {"MAX_RESTARTS": "0"}, "run", "doctor")
    assert done.returncode == 42
    assert "[worker-0] the processes of the run have disappeared" in done.stderr


def test_tpu_vm_wrapper_stops_once(slice_of_two: dict[str, str], tmp_path: Path) -> None:
    """A second signal would end the run at once. gcloud repeats the command, because it has lost the connection."""
    pkill = tmp_path / "bin" / "pkill"
    pkill.write_text('#!/bin/sh\necho "$FAKE_HOST" >> "$FAKE/signals"\n')
    pkill.chmod(0o755)
    for count in (1, 2):
        assert tpu_vm(slice_of_two | {"RETRIED": "1 2"}, "stop").returncode == 0
        signals = (tmp_path / "signals").read_text().split()
        assert sorted(signals) == sorted(["worker-0", "worker-1"] * count)


def test_tpu_vm_wrapper_mistakes_and_dry_run(slice_of_two: dict[str, str], tmp_path: Path) -> None:
    for arguments in ((), ("dance",), ("setup",), ("setup", "no-such.whl"), ("run",)):
        assert tpu_vm(slice_of_two, *arguments).returncode == 2
    without = {key: value for key, value in slice_of_two.items() if key != "TPU_NAME"}
    assert "TPU_NAME" in tpu_vm(without, "run", "doctor").stderr
    wheel = tmp_path / "diffumesh-1.whl"
    wheel.touch()
    for arguments in (("setup", str(wheel)), ("run", "doctor"), ("follow",), ("stop",)):
        done = tpu_vm(slice_of_two | {"DRY_RUN": "1"}, *arguments)
        assert done.returncode == 0
        assert "gcloud compute tpus tpu-vm" in done.stdout + done.stderr
    assert not (tmp_path / "calls").exists()
