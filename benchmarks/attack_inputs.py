"""Attacks with inputs: weights that are not finite, hostile lines in a batch's input, and changed bits in its results.

While the batch runs, a second writer also tries to open its output folder.
"""

from __future__ import annotations

import codecs
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.command_attacks import convert_to, copy_demo, cover, ends_with_one_error
from checkpoints import CheckpointError, open_folder, parse_json_object, verify
from launch.batches.folder import ERRORS, LOCK, RESULTS, BatchFolder
from launch.batches.lines import MAX_LINE_BYTES
from launch.batches.records import Key, key_of
from runtime import InputError

_WEIGHTS = "model.safetensors"
_EMBEDDING = "model.embed_tokens.weight"
# A token that stands for a part of a rare character. In some attacks its embedding is NaN.
TOKEN = 250
# What elements of tensors are replaced with, by name.
NUMBERS = {"nan": np.nan, "infinity": np.inf, "minus infinity": -np.inf}
_LARGEST = float(np.finfo(np.float32).max)
_LIMIT = 300.0


def damage(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Change the weights of a copy of the demo, and write a manifest that agrees with them."""
    tensors = {name: np.array(data) for name, data in load_file(folder / _WEIGHTS).items()}
    change(tensors)
    save_file(tensors, folder / _WEIGHTS)
    cover(folder)


def _is_named(attempt: Callable[[], object], tensor: str) -> bool:
    try:
        attempt()
    except CheckpointError as error:
        return f"NaN or infinity in {tensor} (1 " in str(error)
    return False


def _generate_refuses(folder: Path) -> bool:
    command = ["launch.generate", "--prompt=def f(x):", "--max_new_tokens=4", "--mesh=tensor=1", "--json"]
    return ends_with_one_error([*command, f"--checkpoint={folder}"], "NaN or infinite")


def attack_numbers(tensors: int, generations: Sequence[str] = (*NUMBERS, "overflow")) -> dict[str, Any]:
    """Put NaN and infinity into weights; count how often ``verify`` and ``convert`` name the tensor.

    Args:
      tensors: how many tensors to damage; each gets each of :data:`NUMBERS`, in one random element.
      generations: which numbers fill the output head in runs of ``diffumesh generate``; "overflow" is the largest
        finite number.
    """
    generator = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder, output = copy_demo(Path(name, "model")), Path(name, "output")
        intact = (folder / _WEIGHTS).read_bytes()
        names = generator.sample(sorted(load_file(folder / _WEIGHTS)), tensors)
        verified = converted = passed_on = 0
        for tensor in names:
            for number in NUMBERS.values():

                def put(found: dict[str, np.ndarray], tensor: str = tensor, number: float = number) -> None:
                    found[tensor].flat[generator.randrange(found[tensor].size)] = number

                damage(folder, put)
                verified += _is_named(lambda: verify(open_folder(folder)), tensor)
                converted += _is_named(lambda: convert_to(folder, output), tensor)
                passed_on += output.exists()
                (folder / _WEIGHTS).write_bytes(intact)
        refused = 0
        for kind in generations:
            number = NUMBERS.get(kind, _LARGEST)
            damage(folder, lambda found, number=number: found["lm_head.weight"].fill(number))  # type: ignore[misc]
            refused += _generate_refuses(folder)
    return {
        "tried": len(names) * len(NUMBERS),
        "verify": verified,
        "convert": converted,
        "passed_on": passed_on,
        "generations": {"tried": len(generations), "refused": refused},
    }


# ---- batches ------------------------------------------------------------------------------------------------------


def hostile_lines(copies: int) -> list[bytes]:
    """Return lines that a batch cannot run. No valid id occurs twice."""
    spaces = json.dumps(" " * (12 << 20)).encode()
    lines = []
    for number in range(copies):
        lines += [
            b'{"id": "long %d", "prompt": "%b"}' % (number, b"x" * (MAX_LINE_BYTES + 1)),
            b'{"id": "spaces %d", "prompt": %b}' % (number, spaces),  # the tokenizer panics
            b'{"id": "tokens %d", "prompt": [%b]}' % (number, b"5," * 999_999 + b"5"),
            b'{"id": "surrogate %d", "prompt": "\\ud800"}' % number,
            b'{"id": "nan %d", "prompt": "x", "temperature": NaN}' % number,
            b'{"id": "\\u001b[2J %d", "prompt": "x"}' % number,
            b'{"id": "steps %d", "prompt": "x", "steps": %b}' % (number, b"9" * 5000),
            b'{"id": "depth %d", "prompt": %b}' % (number, b"[" * 100_000),
            codecs.BOM_UTF8 + b'{"id": "mark %d", "prompt": "x"}' % number,
            b"\xff\xfe%d" % number,
        ]
    return lines


def change_results(path: Path, known: set[Key], count: int) -> dict[str, int]:
    """Change one bit of a batch's results at a time; count how often the next run finds the change."""
    generator, before = random.Random(0), path.read_bytes()
    tried = found = 0
    while tried < count:
        at = generator.randrange(len(before))
        after = before[:at] + bytes([before[at] ^ 1 << generator.randrange(8)]) + before[at + 1 :]
        path.write_bytes(after)
        tried += 1
        try:
            folder = BatchFolder(path.parent)
            try:
                # A line without its end is removed, and its result is computed again.
                found += bool(folder.repaired) or folder.done(known) != known
            finally:
                folder.close()
        except InputError:
            found += 1
    path.write_bytes(before)
    return {"tried": tried, "found": found}


def second_writers(folder: Path, count: int) -> dict[str, int]:
    """Remove the lock file of a running batch and try to write into its folder; count refusals."""
    refused = 0
    for _ in range(count):
        (folder / LOCK).unlink(missing_ok=True)
        try:
            BatchFolder(folder).close()
        except InputError:
            refused += 1
    return {"tried": count, "refused": refused}


def _records(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [parse_json_object(line) for line in lines if line.endswith(b"\n")]


def _write_batch(path: Path, lines: int, copies: int) -> tuple[int, int]:
    """Write the input of a batch as an editor on Windows does, with a byte order mark and CRLF.

    Returns:
      The number of lines that cannot be run, and the number of lines whose logits are NaN.
    """
    bad = hostile_lines(copies)
    # The longest prompts are run first.
    poisoned = [b'{"id": "poisoned %d", "prompt": [%b%d]}' % (number, b"7, " * 20, TOKEN) for number in range(copies)]
    with path.open("wb") as file:
        file.write(codecs.BOM_UTF8)
        for number in range(lines):
            file.write(b'{"id": "%d", "prompt": "def add_%d(a, b):\\n"}\r\n' % (number, number))
            if number == 0:
                file.write(b"".join(line + b"\r\n" for line in (*poisoned, *bad)))
    return len(bad), len(poisoned)


def attack_batch(lines: int, copies: int, changes: int) -> dict[str, Any]:
    """Run a batch of many lines, some of them hostile; measure the seconds until the first result is on disk.

    Args:
      lines: number of valid lines.
      copies: number of copies of each of :func:`hostile_lines`, and of prompts whose logits are NaN.
      changes: number of changes to the results, and of attempts to write into the folder of the running batch.
    """
    with tempfile.TemporaryDirectory() as name:
        source, output, model = Path(name, "in.jsonl"), Path(name, "out"), copy_demo(Path(name, "model"))
        damage(model, lambda tensors: tensors[_EMBEDDING][TOKEN].fill(np.nan))
        bad, poisoned = _write_batch(source, lines, copies)
        command = [sys.executable, "-m", "launch.batch", f"--input={source}", f"--output_dir={output}", "--skip_bad"]
        command += ["--max_new_tokens=8", "--mesh=tensor=1", f"--checkpoint={model}"]
        start = time.monotonic()
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

        def wait(is_there: Callable[[], bool], limit: float) -> None:
            while not is_there() and time.monotonic() - start < limit:
                if process.poll() is not None:
                    raise RuntimeError(f"diffumesh batch ended with exit code {process.returncode}")
                time.sleep(0.05)

        try:
            results = output / RESULTS
            wait(lambda: results.exists() and results.stat().st_size > 0, 20 * _LIMIT)
            seconds = round(time.monotonic() - start, 2)
            writers = second_writers(output, changes)
            wait(lambda: len(_records(output / ERRORS)) >= bad + poisoned, seconds + _LIMIT)
        finally:
            process.kill()
            process.wait()
        errors, made = _records(output / ERRORS), _records(results)
        not_finite = sum(one["error"].get("code") == "non_finite_logits" for one in errors)
        results.write_bytes(b"".join(results.read_bytes().splitlines(keepends=True)[:8]))
        known = {key for one in _records(results) if (key := key_of(one)) is not None}
        return {
            "lines": lines,
            "first_result_seconds": seconds,
            "wrong_results": sum(not one["id"].isdecimal() for one in made),
            "bad_lines": {"tried": bad, "reported": len(errors) - not_finite},
            "non_finite": {"tried": poisoned, "reported": not_finite},
            "second_writers": writers,
            "changed_results": change_results(results, known, changes),
        }
