"""The server as a process: the commands of its README, signals, and two hosts of which one is killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.faults import HEARTBEAT, HostProcesses, names_host
from launch import serve
from launch.serving.http import listen
from launch.serving.limits import allow_files
from runtime import DiffusionConfig
from sharding.errors import InputError
from tests.launch.served import PATIENCE, demo, wait_for

ROOT = Path(__file__).parents[2]
PROMPT = "def is_even(number):\n"
ARGUMENTS = ["--port=0", "--canvas=64", "--slots=2", "--max_new_tokens=24"]
_ADDRESS = re.compile(r"serving demo on (http://[\d.:]+)")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("compiled")
    folder.chmod(0o700)
    return f"--compile_cache={folder}"


def address(log: Callable[[], str], process: Callable[[], int | None] = lambda: None) -> str:
    end = time.monotonic() + 180
    while (found := _ADDRESS.search(log())) is None:
        assert time.monotonic() < end, log()
        assert process() is None, log()
        time.sleep(0.1)
    return found[1]


@contextmanager
def starting(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    command = [sys.executable, "-m", "launch.serve", *ARGUMENTS, *arguments]
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stderr=file)
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    with starting(folder, *arguments) as (process, log):
        yield address(log.read_text, process.poll), process, log


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def streams(url: str, count: int, tokens: int) -> tuple[list[threading.Thread], list[str]]:
    """Start streams that generate all their tokens, in one thread each. Return the threads and the texts so far."""
    texts: list[str] = [""] * count

    def read(number: int) -> None:
        body = {"prompt": PROMPT, "max_tokens": tokens, "block_length": 4, "stream": True, "seed": number}
        body["early_stop"] = False
        with (
            contextlib.suppress(httpx.TransportError),  # the server has ended; the text until then is kept
            httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer,
        ):
            for part in answer.iter_text():
                texts[number] += part

    threads = [threading.Thread(target=read, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads, texts


@pytest.mark.skipif(shutil.which("curl") is None, reason="the README's commands are curl's, and there is none on PATH")
def test_the_readmes_commands_and_a_signal(tmp_path: Path, compiled: str) -> None:
    readme = (ROOT / "launch" / "serving" / "README.md").read_text()
    block = readme[readme.index("## Quickstart") :].split("```bash\n")[2].partition("```")[0]
    commands = [shlex.split(line) for line in block.replace("\\\n", " ").splitlines() if line]
    assert len(commands) == 3
    with started(tmp_path, "--mesh=tensor=1", compiled, f"--grace={PATIENCE}") as (url, process, log):
        answers = []
        for command in commands:
            assert command[0] == "curl"
            own = [word.replace("http://127.0.0.1:8000", url) for word in command]
            answers.append(subprocess.run([*own, "-s"], capture_output=True, text=True, timeout=60, check=True).stdout)
        config = DiffusionConfig.published(32, 0.2, steps=16, seed=1)
        expected = demo().generate([PROMPT], config)[0].text
        assert json.loads(answers[0])["choices"][0]["text"] == expected
        assert answers[1].rstrip().endswith("data: [DONE]")
        assert "".join(event["choices"][0]["text"] for event in events(answers[1])).strip()
        assert len(json.loads(answers[2])["data"][0]["token_logprobs"]) > 3
        threads, texts = streams(url, 8, 32)
        wait_for(lambda: any(texts))
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(PATIENCE)
        assert process.wait(2 * PATIENCE) == 0, log.read_text()
    assert all(text.rstrip().endswith("data: [DONE]") for text in texts), "none is cut short"
    assert "SIGTERM: finishing work in flight" in log.read_text()


@pytest.mark.slow
def test_a_trace_and_the_programs(tmp_path: Path, compiled: str) -> None:
    trace, programs = tmp_path / "trace", tmp_path / "programs"
    flags = ["--mesh=tensor=1", "--slots=1", compiled, f"--profile_dir={trace}", f"--dump_hlo={programs}"]
    with started(tmp_path, *flags) as (url, process, log):
        body = {"prompt": PROMPT, "max_tokens": 4}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(2 * PATIENCE) == 0, log.read_text()
    assert list(trace.rglob("*.xplane.pb"))
    assert any("denoise_step" in path.read_text() for path in programs.glob("*.hlo.txt"))


@pytest.mark.slow
def test_a_grace_that_is_too_short_and_a_second_signal(tmp_path: Path, compiled: str) -> None:
    for more, signals in (["--grace=0.01"], 1), ([], 2):
        with started(tmp_path, "--mesh=tensor=1", compiled, *more) as (url, process, log):
            threads, texts = streams(url, 8, 32)
            wait_for(lambda texts=texts: any(texts))  # type: ignore[misc]
            for _ in range(signals):
                process.send_signal(signal.SIGTERM)
                time.sleep(0.05)
            assert process.wait(PATIENCE) == 42
            for thread in threads:
                thread.join(PATIENCE)
            if signals == 1:
                assert any("The server is shutting down." in text for text in texts)
                assert "were not finished within --grace=0.01 s" in log.read_text()
            else:
                assert "a second SIGTERM" in log.read_text()


def test_two_hosts_and_the_death_of_one(tmp_path: Path, compiled: str) -> None:
    command = [sys.executable, "-m", "launch.serve", *ARGUMENTS, "--mesh=data=2", compiled]
    command += [f"--heartbeat_timeout={HEARTBEAT}"]
    with HostProcesses([command] * 2, tmp_path) as processes:
        url = address(lambda: processes.text("err")[0])
        found = httpx.post(
            f"{url}/v1/completions", json={"prompt": [PROMPT, "import"], "seed": 3, "n": 2}, timeout=PATIENCE
        ).json()
        engine, config = demo(), DiffusionConfig.published(24, 0.2, seed=3)
        expected = engine.generate([PROMPT, "import"], config, num_return_sequences=2)
        assert [choice["text"] for choice in found["choices"]] == [one.text for one in expected]
        # Host 0 finds a stop string, and all hosts free the slot.
        body = {"prompt": PROMPT, "seed": 3, "stop": " %", "early_stop": False}
        (stopped,) = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json()["choices"]
        before, found_stop, _ = expected[0].text.partition(" %")
        assert found_stop
        assert (stopped["text"], stopped["finish_reason"]) == (before, "stop")
        scores = httpx.post(f"{url}/v1/score", json={"input": PROMPT}, timeout=PATIENCE)
        assert scores.status_code == 200
        threads, texts = streams(url, 4, 36)
        whole: list[httpx.Response] = []
        body = {"prompt": PROMPT, "max_tokens": 36, "n": 4, "early_stop": False}
        ask = threading.Thread(
            target=lambda: whole.append(httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE))
        )
        ask.start()
        threads.append(ask)
        wait_for(lambda: any(texts))
        processes.send(1, signal.SIGKILL)
        assert processes.wait(30) == [42, 137]
        for thread in threads:
            thread.join(PATIENCE)
        logs = processes.text("err")
    assert names_host(logs[0], 1), logs[0]
    # Each answer is complete or contains the error.
    failed = ['"code":"engine_failed"' in text.replace(" ", "") for text in texts]
    assert any(failed)
    assert all(said or text.rstrip().endswith("data: [DONE]") for said, text in zip(failed, texts, strict=True)), texts
    assert whole[0].status_code in (200, 503)
    assert whole[0].status_code == 200 or whole[0].json()["error"]["code"] == "engine_failed"


@pytest.mark.slow
def test_a_signal_to_one_host_drains_all(tmp_path: Path, compiled: str) -> None:
    command = [sys.executable, "-m", "launch.serve", *ARGUMENTS, "--mesh=tensor=2", "--grace=120", compiled]
    with HostProcesses([command] * 2, tmp_path) as processes:
        url = address(lambda: processes.text("err")[0])
        time.sleep(1.0)  # idle hosts exchange several empty turns
        threads, texts = streams(url, 6, 32)
        wait_for(lambda: any(texts))
        processes.send(1, signal.SIGTERM)
        for thread in threads:
            thread.join(2 * PATIENCE)
        assert processes.wait(60) == [0, 0], processes.text("err")
    assert all(text.rstrip().endswith("data: [DONE]") for text in texts)


@pytest.mark.slow
def test_idle_hosts_wait_for_a_frozen_one_and_end_with_a_dead_one(tmp_path: Path, compiled: str) -> None:
    """A collective waits longer than gloo's own default of 30 s, and its supervisor ends a host that waits in one."""
    command = [sys.executable, "-m", "launch.serve", *ARGUMENTS, "--mesh=tensor=2", compiled]
    with HostProcesses([command] * 2, tmp_path) as processes:
        url = address(lambda: processes.text("err")[0])
        body = {"prompt": PROMPT, "seed": 3}
        before = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json()["choices"]
        os.killpg(processes.groups[0], signal.SIGSTOP)
        time.sleep(35)
        os.killpg(processes.groups[0], signal.SIGCONT)
        after = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json()["choices"]
        assert [choice["text"] for choice in after] == [choice["text"] for choice in before]
        os.killpg(processes.groups[0], signal.SIGKILL)
        assert processes.wait(30) == [137, 42]
        assert names_host(processes.text("err")[1], 0), processes.text("err")[1]


@pytest.mark.slow
def test_a_signal_while_it_is_compiling(tmp_path: Path) -> None:
    modes = [f"--mode=cache=dual,block_length={length}" for length in range(4, 24)]
    with starting(tmp_path, "--mesh=tensor=1", "--compile_cache=", *modes) as (process, log):
        wait_for(lambda: "decoding: " in log.read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0, log.read_text()
    assert "SIGTERM: finishing work in flight" in log.read_text()
    assert "serving" not in log.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host=0.0.0.0"], "give --api_key_file"),
        (["--host=256.1.1.1", "--api_key_file=/nowhere"], "--api_key_file=/nowhere: cannot be read"),
        (["--canvas=4096"], "the model allows 2048"),
        (["--canvas=64", "--canvas=128", "--max_programs=1"], "--max_programs=1 is too few for 2 widths"),
        (["--mode=cache"], "expected name=value"),
        (["--mode=cache=dual,refresh_interval=0"], "--mode=cache=dual,refresh_interval=0: refresh_interval is 0"),
        (["--mode=parallel=threshold,threshold=0.8"], "threshold is set in each request, not in a mode"),
        (["--max_rows=100"], "must not exceed --max_queue=64"),
        (["--temperature=-1"], "temperature is -1"),
        (["--seed=7"], "--seed is not available in serve"),
        (["--log_probabilities"], "--log_probabilities is not available in serve"),
        (["--max_steps=32"], "--max_steps is 32; by default a block of 512 positions has 64 steps"),
        (["--parallel=threshold", "--max_steps=64"], "--max_steps is 64; by default a block of 512 positions has 512"),
        (
            ["--mode=parallel=factor", "--max_steps=64"],
            "--max_steps is 64; by default a block of 512 positions has 512",
        ),
        (["--canvas=64"], "--canvas=64 has no room for a prompt beside 64 new tokens"),
        (["--preset=class", "--canvas=256"], "--canvas=256 has no room for a prompt beside 256 new tokens"),
    ],
)
def test_wrong_flags(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as stop:
        serve.run(["serve", *arguments])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_as_many_open_files_as_connections_want(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource", reason="no limits of this kind on this system")
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: found.append(limits))
    unlimited = resource.RLIM_INFINITY
    for limits, raised in (
        ((1024, 4096), [(4096, 4096)]),
        ((256, unlimited), [(1128, unlimited)]),
        ((4096, 4096), []),
        ((unlimited, unlimited), []),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limits=limits: limits)
        allow_files(1000)
        assert found == raised, limits
        found.clear()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 1024))
    with pytest.raises(InputError, match=r"needs 1128 open files, but ulimit -n allows 1024.*--max_connections=896"):
        allow_files(1000)


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    own = listen("127.0.0.1", 0)
    own.listen()
    with pytest.raises(SystemExit) as stop:
        serve.run(["serve", f"--port={own.getsockname()[1]}"])
    assert stop.value.code == 2
    assert "cannot listen there" in capsys.readouterr().err
    own.close()
