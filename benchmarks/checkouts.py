"""Processes of several checkouts of the project, which run the same script and answer commands in turn.

The script runs with a checkout's root on ``PYTHONPATH`` and uses names that old checkouts have too. It answers with a
line of JSON when it is ready, and then to each line of standard input.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoints import parse_json_object
from sharding.errors import InputError

_ROOT = Path(__file__).parents[1]


def check_checkout(name: str, path: str) -> Path:
    """Return the root of another checkout.

    Args:
      name: name of the flag.
      path: the folder.

    Raises:
      InputError: it is not a checkout of this project.
    """
    root = Path(path).resolve()
    if not (root / "runtime" / "engine.py").is_file():
        raise InputError(f"--{name}={path}: not the root of a checkout of this project")
    return root


class Checkout:
    """A process of one checkout that answers commands.

    Attributes:
      first: the answer that says that the process is ready.
    """

    def __init__(self, script: Path, root: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process, and wait until it is ready."""
        self._script = script.name
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script), *arguments],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first = self.answer()

    def answer(self) -> dict[str, Any]:
        """Wait for the next answer, and return it.

        Raises:
          InputError: the process has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise InputError(f"{self._script} ended with exit code {self._process.wait()}; see above")
        return parse_json_object(line.encode())

    def tell(self, command: str) -> None:
        """Send a command without waiting for its answer."""
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and return its answer."""
        self.tell(command)
        return self.answer()

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def checkouts(
    script: Path, roots: Mapping[str, Path | None], arguments: Sequence[str], environment: Mapping[str, str]
) -> Iterator[dict[str, Checkout]]:
    """Start a process for each checkout, and yield the processes by name; end them when the context ends.

    Args:
      script: the script that all of them run.
      roots: root of each checkout by name; None for this one.
      arguments: arguments of the script.
      environment: changes to the environment.
    """
    with contextlib.ExitStack() as stack:
        found = {}
        for name, root in roots.items():
            found[name] = Checkout(script, root or _ROOT, arguments, environment)
            stack.callback(found[name].end)
        yield found
