"""The measured processes: servers of a checkout, its batch command, and a loop over ``engine.generate``."""

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

from checkpoints import parse_json_object
from launch.hosts.local_processes import free_port
from launch.process.startup import this_host
from sharding.errors import InputError

TIMEOUT = 900.0
_ROOT = Path(__file__).parents[2]
_LOOP = Path(__file__).with_name("generate_loop.py")
# Variables that processes do not inherit: with the user's compile cache, a cold start would be warm.
_CACHE_VARIABLES = ("JAX_COMPILATION_CACHE_DIR",)


@dataclass(frozen=True)
class Checkout:
    """A checkout of the project and the interpreter that runs it.

    Attributes:
      name: ``old`` or ``new``.
      root: its folder.
      python: an interpreter with its dependencies.
    """

    name: str
    root: Path
    python: str

    @classmethod
    def this(cls) -> Checkout:
        """Return the checkout that this code is in."""
        return cls("new", _ROOT, sys.executable)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for its processes."""
        kept = {name: value for name, value in os.environ.items() if name not in _CACHE_VARIABLES}
        return kept | {"PYTHONPATH": str(self.root)}

    @property
    def commit(self) -> str | None:
        """The commit; None if it is unknown."""
        command = ["git", "-C", str(self.root), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


class Server:
    """The process of a server.

    Attributes:
      checkout: the checkout that it runs.
      address: its URL.
      seconds_to_ready: time from the start of the process until ``/health`` reported ready.
      programs_at_ready: number of programs that were compiled or read from the cache by then.
      remaining_at_ready: number of programs that were not compiled yet.
    """

    def __init__(self, checkout: Checkout, arguments: Sequence[str]) -> None:
        """Start the server, and wait until it is ready.

        Raises:
          InputError: the process ends, or is not ready in time.
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
        """Wait until a condition is true. Return the seconds since the start of the process."""
        while not reached():
            this_host().mark()
            if self._process.poll() is not None or time.perf_counter() - self._start > TIMEOUT:
                self._log.seek(0)
                said = self._log.read().decode(errors="replace")
                raise InputError(f"the {self.checkout.name} server did not start:\n{said[-2000:]}")
            time.sleep(0.05)
        return time.perf_counter() - self._start

    def _status(self) -> int:
        try:
            return httpx.get(f"{self.address}/health", timeout=TIMEOUT).status_code
        except httpx.TransportError:
            return 0

    def remaining(self) -> int:
        """Return the number of programs that are not compiled yet; 0 for a server that reports no such number."""
        answer = httpx.get(f"{self.address}/health", timeout=TIMEOUT).raise_for_status()
        return int(answer.json().get("programs_remaining", 0))

    def wait_for_programs(self) -> float:
        """Wait until all programs are compiled. Return the seconds since the start of the process."""
        return self._wait(lambda: self.remaining() == 0)

    def metric(self, name: str) -> float:
        """Return a metric, summed over its labels; 0 if the server does not have it."""
        return metric(self.address, name)

    def reports(self, name: str) -> bool:
        """Return whether the server has a metric."""
        return f"\n# TYPE diffumesh:{name} " in httpx.get(f"{self.address}/metrics", timeout=TIMEOUT).text

    def wait_until_idle(self) -> None:
        """Wait until no request is running or waiting."""
        while self.metric("num_requests_running") + self.metric("num_requests_waiting"):
            time.sleep(0.05)

    def end(self) -> None:
        """End the process and wait for it."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


@contextlib.contextmanager
def server(checkout: Checkout, arguments: Sequence[str]) -> Iterator[Server]:
    """Start a server, and end it when the context ends."""
    found = Server(checkout, arguments)
    try:
        yield found
    finally:
        found.end()


def metric(address: str, name: str) -> float:
    """Return a metric of a server, summed over its labels; 0 if the server does not have it."""
    text = httpx.get(f"{address}/metrics", timeout=TIMEOUT).text
    lines = [line for line in text.splitlines() if line.startswith((f"diffumesh:{name}{{", f"diffumesh:{name} "))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


class GenerateLoop:
    """A process of this checkout that runs ``engine.generate`` for one request after another."""

    def __init__(self, checkout: Checkout, checkpoint: str, cache: Path) -> None:
        """Start the process with ``cache`` as its compile cache, and wait until the model is loaded."""
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
        return parse_json_object(line.encode())

    def _call(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        this_host().mark()
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return self._answer()

    def generate(self, prompt: str, max_tokens: int, seed: int) -> dict[str, Any]:
        """Generate one request with compiled programs. Return ``seconds``, ``text`` and ``prompt_tokens``."""
        return self._call(prompt=prompt, max_tokens=max_tokens, seed=seed)

    def rate(self, rows: int, canvas: int) -> float:
        """Return the positions per second at which full rows of ``canvas`` positions are denoised."""
        return float(self._call(rows=rows, canvas=canvas)["positions_per_second"])

    def end(self) -> None:
        """End the process and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def generate_loop(checkout: Checkout, checkpoint: str, cache: Path) -> Iterator[GenerateLoop]:
    """Start a process that runs ``engine.generate`` for one request after another, and end it with the context.

    Args:
      checkout: the code that the process runs.
      checkpoint: the model.
      cache: folder of JAX's compile cache.
    """
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
      ``wall``: seconds of the whole process. ``generating``: seconds from the end of loading the model to the end
      of the process, including the compilation of programs. ``forwards``, ``computed_positions``, ``programs``: what
      the process says that it computed and compiled.

    Raises:
      InputError: the command fails.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        [checkout.python, "-m", "launch.batch", "--verbose", *arguments],
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
        if line.startswith("decoding: "):  # printed once the model is loaded, with --verbose
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
