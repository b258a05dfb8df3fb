"""The processes that are measured: servers of a checkout, its batch command, and a loop over ``engine.generate``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from launch.hosts.local_processes import free_port
from launch.process.startup import this_host
from sharding.errors import InputError

PATIENCE = 900.0
_ROOT = Path(__file__).parents[2]
_LOOP = Path(__file__).with_name("generate_loop.py")
# A folder of the user's own would make a cold start warm.
_CACHE_VARIABLES = ("JAX_COMPILATION_CACHE_DIR",)


@dataclass(frozen=True)
class Checkout:
    """A checkout of the project and the interpreter that runs it.

    Attributes:
      name: ``old`` or ``new``.
      root: its folder.
      python: the interpreter, of an environment that has its dependencies.
    """

    name: str
    root: Path
    python: str

    @classmethod
    def this(cls) -> Checkout:
        """This one."""
        return cls("new", _ROOT, sys.executable)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its processes."""
        kept = {name: value for name, value in os.environ.items() if name not in _CACHE_VARIABLES}
        return kept | {"PYTHONPATH": str(self.root)}

    @property
    def commit(self) -> str | None:
        """What is checked out; None where that is unknown."""
        command = ["git", "-C", str(self.root), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


class Server:
    """A server that answers.

    Attributes:
      checkout: whose it is.
      address: where it listens.
      seconds_to_ready: from the start of the process until ``/health`` said ready.
      programs_at_ready: that it had compiled or read from the cache by then.
      remaining_at_ready: programs that were still to be compiled then.
    """

    def __init__(self, checkout: Checkout, arguments: Sequence[str]) -> None:
        """Start it, and wait until it is ready.

        Raises:
          InputError: it ends, or is not ready for long.
        """
        port = free_port()
        self.checkout, self.address = checkout, f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end
        self._start = time.perf_counter()
        self._process = subprocess.Popen(
            [checkout.python, "-m", "launch.serve", f"--port={port}", *arguments],
            cwd=checkout.root,
            env=checkout.environment,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )
        try:
            self.seconds_to_ready = self._wait(lambda: self._status() == 200)
            self.programs_at_ready = int(self.metric("programs_compiled"))
            self.remaining_at_ready = self.remaining()
        except BaseException:
            self.end()
            raise

    def _wait(self, reached: Any) -> float:
        """Seconds from the start of the process until something is so."""
        while not reached():
            this_host().mark()
            if self._process.poll() is not None or time.perf_counter() - self._start > PATIENCE:
                self._log.seek(0)
                said = self._log.read().decode(errors="replace")
                raise InputError(f"the {self.checkout.name} server has not started:\n{said[-2000:]}")
            time.sleep(0.05)
        return time.perf_counter() - self._start

    def _status(self) -> int:
        try:
            return httpx.get(f"{self.address}/health", timeout=PATIENCE).status_code
        except httpx.TransportError:
            return 0

    def remaining(self) -> int:
        """Programs that are still to be compiled; none of a server that compiles all of them before it is ready."""
        answer = httpx.get(f"{self.address}/health", timeout=PATIENCE).raise_for_status()
        return int(answer.json().get("programs_remaining", 0))

    def wait_for_programs(self) -> float:
        """Wait until all programs are there. Returns seconds from the start of the process."""
        return self._wait(lambda: self.remaining() == 0)

    def metric(self, name: str) -> float:
        """A metric, summed over its labels; 0 if the server has none of this name."""
        return metric(self.address, name)

    def wait_until_idle(self) -> None:
        """Wait until no row is in a slot or waits for one."""
        while self.metric("num_requests_running") + self.metric("num_requests_waiting"):
            time.sleep(0.05)

    def end(self) -> None:
        """End it."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


@contextlib.contextmanager
def server(checkout: Checkout, arguments: Sequence[str]) -> Iterator[Server]:
    """A server for as long as the block lasts."""
    found = Server(checkout, arguments)
    try:
        yield found
    finally:
        found.end()


def metric(address: str, name: str) -> float:
    """A metric of a server, summed over its labels; 0 if it has none of this name."""
    text = httpx.get(f"{address}/metrics", timeout=PATIENCE).text
    lines = [line for line in text.splitlines() if line.startswith((f"diffumesh:{name}{{", f"diffumesh:{name} "))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


class GenerateLoop:
    """A process of this checkout that runs ``engine.generate`` for one request after another."""

    def __init__(self, checkout: Checkout, checkpoint: str, cache: Path) -> None:
        """Start it, and wait until the model is loaded; compiled programs are kept in ``cache``."""
        self._process = subprocess.Popen(
            [checkout.python, str(_LOOP), checkpoint],
            cwd=checkout.root,
            env=checkout.environment | {"JAX_COMPILATION_CACHE_DIR": str(cache)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise InputError(f"the loop over engine.generate ended with exit code {self._process.wait()}; see above")
        found: dict[str, Any] = json.loads(line)
        return found

    def _call(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        this_host().mark()
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return self._answer()

    def generate(self, prompt: str, max_tokens: int, seed: int) -> dict[str, Any]:
        """``seconds``, ``text`` and ``prompt_tokens`` of one request, with every program that it uses compiled."""
        return self._call(prompt=prompt, max_tokens=max_tokens, seed=seed)

    def rate(self, rows: int, canvas: int) -> float:
        """Positions a second that this many rows of this many positions are denoised at, each one full."""
        return float(self._call(rows=rows, canvas=canvas)["positions_per_second"])

    def end(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def generate_loop(checkout: Checkout, checkpoint: str, cache: Path) -> Iterator[GenerateLoop]:
    """A loop for as long as the block lasts."""
    found = GenerateLoop(checkout, checkpoint, cache)
    try:
        yield found
    finally:
        found.end()


# The line of ``diffumesh batch`` that says what was computed.
_COMPUTED = re.compile(r"(\d+) forward passes, (\d+) positions computed, .* (\d+) programs compiled")


def run_batch(checkout: Checkout, arguments: Sequence[str]) -> dict[str, float]:
    """Run ``diffumesh batch`` once.

    Returns:
      ``wall``: seconds of the whole process. ``generating``: seconds from the line that says how is decoded, which is
      printed when the model is loaded, to the end; programs that are compiled or read from the cache are in it.
      ``forwards``, ``computed_positions``, ``programs``: what the process says it computed and compiled.

    Raises:
      InputError: it fails.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        [checkout.python, "-m", "launch.batch", *arguments],
        cwd=checkout.root,
        env=checkout.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    loaded, said = start, []
    for line in process.stderr:
        said.append(line)
        this_host().mark()
        if line.startswith("decoding: "):
            loaded = time.perf_counter()
    if code := process.wait():
        raise InputError(f"the batch ended with exit code {code}:\n{''.join(said)[-2000:]}")
    end = time.perf_counter()
    found = _COMPUTED.search("".join(said))
    counts = (
        dict(zip(("forwards", "computed_positions", "programs"), map(int, found.groups()), strict=True))
        if found
        else {}
    )
    return {"wall": round(end - start, 3), "generating": round(end - loaded, 3), **counts}
