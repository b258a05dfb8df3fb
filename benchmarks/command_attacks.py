"""Attacks on commands: kills, links and large files in a checkpoint's folder, outputs that cannot be written."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import (
    DEMO,
    CheckpointError,
    FolderOutput,
    convert,
    export_checkpoint,
    folder_fingerprint,
    open_folder,
    verify,
    write_manifest,
)
from launch.folders.models import print_licence
from launch.hosts.faults import EXIT_USER_ERROR
from runtime import ModelLayout, TextTokenizer, model_layout, parse_config

# Files that some command copies or reads beside the weights.
SIDE_FILES = ("LICENSE", "added_tokens.json", "additional_chat_templates/x.jinja", "tokenizer_config.json")
_SPARSE_BYTES = 6 << 30
_LIMIT = 300.0
ENDLESS_TEMPLATE = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


def copy_demo(folder: Path) -> Path:
    """Copy the demo checkpoint without its programs and data."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "*.jsonl", "__pycache__"))
    return folder


def other_demo(folder: Path) -> Path:
    """Write a checkpoint of the demo's shape with other weights."""
    (weights,) = copy_demo(folder).glob("*.safetensors")
    data = np.frombuffer(weights.read_bytes(), np.uint8).copy()
    first = 8 + int.from_bytes(data[:8].tobytes(), "little")
    data[first + 1 :: 2] ^= 0x80  # the sign of each bfloat16
    weights.write_bytes(data.tobytes())
    cover(folder)
    return folder


def cover(folder: Path) -> ModelLayout:
    """Write a manifest of a folder's present content, in place of any other; return the layout of its model."""
    (folder / "diffumesh.manifest.json").unlink(missing_ok=True)
    checkpoint = open_folder(folder)
    layout = model_layout(parse_config(checkpoint.config))
    write_manifest(checkpoint, layout)
    return layout


def convert_to(folder: Path, output: Path) -> None:
    """Convert a checkpoint, as ``diffumesh convert --overwrite`` does."""
    target, source = FolderOutput(output), open_folder(folder)
    target.prepare(overwrite=True)
    convert(source, model_layout(parse_config(source.config)), target)


def export_to(folder: Path, output: Path) -> None:
    """Export a checkpoint, as ``diffumesh export`` does."""
    target = FolderOutput(output)
    target.prepare(overwrite=True)
    export_checkpoint(open_folder(folder), target)


# All functions that read files beside the weights, called with a folder and an output.
READERS: dict[str, Callable[[Path, Path], object]] = {
    "tokenizer": lambda folder, output: TextTokenizer.from_folder(open_folder(folder)),
    "convert": convert_to,
    "export": export_to,
    "manifest": lambda folder, output: cover(folder),
    "fingerprint": lambda folder, output: folder_fingerprint(open_folder(folder)),
    "licence": lambda folder, output: print_licence(open_folder(folder)),
}


def attack_side_files() -> dict[str, int]:
    """Put links to a file elsewhere and sparse files of 6 GB into a folder; count how often READERS refuse them."""
    tried = refused = passed_on = 0
    with tempfile.TemporaryDirectory() as name:
        folder, output = copy_demo(Path(name, "model")), Path(name, "output")
        (folder / "diffumesh.manifest.json").unlink()  # it would refuse all changes
        secret = Path(name, "secret")
        secret.write_text("{}")
        for side_file in SIDE_FILES:
            path = folder / side_file
            before = path.read_bytes() if path.exists() else None
            for is_link in (True, False):
                path.parent.mkdir(exist_ok=True)
                path.unlink(missing_ok=True)
                if is_link:
                    path.symlink_to(secret)
                else:
                    with path.open("wb") as file:
                        file.truncate(_SPARSE_BYTES)
                for read in READERS.values():
                    tried += 1
                    try:
                        read(folder, output)
                    except CheckpointError:
                        refused += 1
                    passed_on += output.exists()
            path.unlink()
            if before is not None:
                path.write_bytes(before)
    return {"tried": tried, "refused": refused, "passed_on": passed_on}


def attack_replacement(kills: int, seed: int = 0) -> dict[str, int]:
    """Kill ``diffumesh convert --overwrite`` over a different checkpoint at random moments.

    Returns:
      How often it was killed before its end, how often the output was afterwards wholly the old or wholly the new
      checkpoint, and how often a reader found none.
    """
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        output, sources = Path(name, "checkpoint"), [DEMO, other_demo(Path(name, "other"))]
        commands = [
            [sys.executable, "-m", "launch.convert", f"--source={source}", f"--output={output}", "--overwrite"]
            for source in sources
        ]
        wholes, seconds = [], 0.0
        for command in commands:
            start = time.monotonic()
            subprocess.run(command, check=True, capture_output=True, timeout=_LIMIT)
            seconds = time.monotonic() - start
            wholes.append(folder_fingerprint(open_folder(output)))
        survived = missing = interrupted = 0
        for _ in range(kills):
            there = wholes.index(folder_fingerprint(open_folder(output)))
            process = subprocess.Popen(commands[1 - there], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            end = time.monotonic() + generator.uniform(0.2, 1.0) * seconds
            while process.poll() is None and time.monotonic() < end:
                missing += not (output / "config.json").exists()
                time.sleep(0.001)
            process.kill()
            interrupted += process.wait() != 0
            try:
                verify(open_folder(output))
                survived += folder_fingerprint(open_folder(output)) in wholes
            except CheckpointError:
                pass
        return {"tried": kills, "interrupted": interrupted, "whole": survived, "missing": missing}


# A text in the error message of each of the failing commands.
_SAYS = {
    "history": "/proc/page.html",
    "programs": "/proc/programs",
    "full disk": "standard output",
    "template": "did not finish",
    "tokenizer": "tokenizer",
    "port": "--port",
    "output": "/proc",
}


def failing_commands(folder: Path, taken: int) -> dict[str, list[str]]:
    """Return commands that fail for a reason that the user can fix, by the names in :data:`_SAYS`.

    Args:
      folder: a folder to write into.
      taken: a port that is in use.
    """
    endless, torn = copy_demo(folder / "endless"), copy_demo(folder / "torn")
    (endless / "chat_template.jinja").write_text(ENDLESS_TEMPLATE)
    cover(endless)
    (torn / "tokenizer.json").write_text('{"version": "1.0"')
    generate = ["launch.generate", "--prompt=def f(x):", "--max_new_tokens=4", "--mesh=tensor=1"]
    return {
        "history": [*generate, "--history_html=/proc/page.html"],
        "programs": [*generate, "--dump_hlo=/proc/programs"],
        "full disk": [*generate, ">/dev/full"],
        "template": [*generate, "--chat", f"--checkpoint={endless}"],
        "tokenizer": [*generate, f"--checkpoint={torn}"],
        "port": ["launch.serve", "--mesh=tensor=1", f"--port={taken}"],
        "output": ["launch.convert", f"--source={DEMO}", "--output=/proc/checkpoint"],
    }


def ends_with_one_error(arguments: Sequence[str], says: str) -> bool:
    """Return whether a command ends with exit code 2 and a single error message that contains ``says``.

    The argument ``>/dev/full`` redirects the command's output to a full device.
    """
    full = ">/dev/full" in arguments
    command = [sys.executable, "-m", *(one for one in arguments if one != ">/dev/full")]
    with open("/dev/full" if full else os.devnull, "w", encoding="utf-8") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.PIPE, text=True, errors="replace", timeout=_LIMIT, check=False
        )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    one_message = len(errors) == 1 and says in errors[0] and "Traceback" not in done.stderr
    return done.returncode == EXIT_USER_ERROR and one_message


def attack_outputs(only: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
    """Run the failing commands; count those that end with one message, and list the others."""
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as taken:
        commands = failing_commands(Path(name), taken.getsockname()[1])
        found = {one: ends_with_one_error(command, _SAYS[one]) for one, command in commands.items() if only(one)}
    return {"tried": len(found), "one_message": sum(found.values()), "others": [one for one in found if not found[one]]}
