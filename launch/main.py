"""The console command: ``diffumesh generate ...`` runs ``python -m launch.generate ...``, and so do the others."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import traceback
from types import FrameType, ModuleType
from typing import NoReturn

from launch.hosts.faults import EXIT_INTERRUPTED, EXIT_RESTART
from launch.process.startup import fail, version
from launch.process.streams import drop_output, prepare_streams

LAUNCHERS = {
    "generate": "complete prompts with a language model on any mesh",
    "batch": "complete a file of prompts, each exactly once, even across restarts",
    "serve": "serve a model over an OpenAI-compatible HTTP API",
    "convert": "turn a Hugging Face folder into a canonical checkpoint with digests",
    "export": "turn a checkpoint back into a Hugging Face folder",
    "verify": "check every byte of a checkpoint against its digests",
    "inspect": "list the contents of a checkpoint, and the meshes that fit",
    "local": "run a command as several processes on this machine",
    "doctor": "check a machine: versions, devices, collectives, checkpoint",
    "models": "list model families, their presets and ways of decoding, and how each is verified",
    "plan": "estimate which meshes fit a machine, how fast and at what cost",
}


def usage() -> str:
    """Return the text of ``diffumesh --help``."""
    lines = [f"  {name:<10} {what}" for name, what in LAUNCHERS.items()]
    return "\n".join(
        [
            "diffumesh: diffusion language models on any JAX device mesh",
            "",
            "usage: diffumesh COMMAND [--flags]      (diffumesh COMMAND --help lists a command's flags)",
            "",
            "commands:",
            *lines,
        ]
    )


def run() -> None:
    """Run the command that the command line names: the entry point of ``diffumesh``."""
    prepare_streams()
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("--help", "-h", "help", "--version"):
        try:
            print(f"diffumesh {version()}" if command == "--version" else usage(), flush=True)
        except BrokenPipeError:
            drop_output()  # as `diffumesh --help | head` does
        except OSError as error:
            fail(f"standard output: {error.strerror}")
    elif command in LAUNCHERS:
        # The first process of a container ignores SIGTERM otherwise. Commands replace this handler once they start.
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(EXIT_RESTART))
        # Python drops a KeyboardInterrupt in a callback of its garbage collector, and JAX has one.
        before = signal.getsignal(signal.SIGINT)
        if before == signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupted)
        launcher = _imported(command)
        signal.signal(signal.SIGINT, before)
        launcher.run([f"diffumesh {command}", *sys.argv[2:]])
    else:
        fail(f'there is no command "{command}"\n\n{usage()}')


def _imported(command: str) -> ModuleType:
    """Import the module of a command. Exits with 2 if JAX refuses a variable of the environment."""
    try:
        return importlib.import_module(f"launch.{command}")
    except ValueError as error:
        if (message := _refused_setting(error)) is None:
            raise
        fail(message)


def _refused_setting(error: ValueError) -> str | None:
    """Return the message for a variable that JAX refused while it was imported; None for other errors."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames[-1].f_globals.get("__name__") != "jax._src.config":
        return None
    # JAX names some variables in lower case, as its settings.
    named = [name.upper() for name in re.findall(r"\bjax_\w+", str(error), re.IGNORECASE)]
    given = [f"{name}={os.environ[name][:80]!r}" for name in named if name in os.environ]
    if not given:
        return f"JAX does not take the value of a variable in the environment: {error}"
    return f"{', '.join(given)} in the environment: JAX does not take this value; correct or unset it"


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    run()
