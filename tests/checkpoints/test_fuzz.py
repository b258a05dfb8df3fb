"""Mutated safetensors headers, manifests and config.json: a typed error, or a checkpoint that is right.

``python -m tests.checkpoints.test_fuzz WORK KIND SEED COUNT`` runs in a process with limits on memory and time,
in which the tests open possibly harmful files.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import open_folder
from checkpoints.errors import CheckpointError, CorruptCheckpointError
from checkpoints.file_list import StoredFile, dump_files, parse_files
from checkpoints.huggingface import INDEX_FILE
from checkpoints.loading import check_tensors
from checkpoints.manifest import MANIFEST_FILE, seal, unseal
from checkpoints.opening import open_tensors
from checkpoints.source import StoredTensors
from checkpoints.verification import write_manifest
from runtime.models.config import ConfigError
from runtime.models.families import model_layout, parse_config
from tests.checkpoints.small import MICRO, layout_of, to_canonical, write_source

ROOT = Path(__file__).parents[2]
HEADROOM = 512 << 20  # address space in addition to that of the process after it has opened the first checkpoint
SECONDS = 30  # time limit for a case, hundreds of times longer than usual
KINDS = ("header", "index", "huggingface manifest", "canonical manifest", "config", "gpt2 config")

GPT2 = {"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}

HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, -2, 2, 3, 0.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf"),
    (1 << 31) - 1, 1 << 31, (1 << 32) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63), 10**100,
    "", "x", "0", "F32", "BF16", "bfloat16", "float32", "int8", "../..", "/etc/passwd", "\0", "\ud800", "é" * 300,
    "x" * 100_000, [], {}, [[]], {"": {}}, [0] * 1000, ["a"], [-1, 4], [1 << 62, 1 << 62], {"shape": [1]},
]  # fmt: skip


# ---- mutations --------------------------------------------------------------------------------------------------


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON tree."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, child in items for place in [(value, key), *places(child)]]


def hostile(generator: random.Random) -> Any:
    value = generator.choice(HOSTILE)
    return json.loads(json.dumps(value)) if isinstance(value, list | dict) else value


def mutate_tree(tree: Any, generator: random.Random) -> Any:
    """Another value, a number a little off, a key gone, renamed or added, two values swapped; once or several times."""
    for _ in range(generator.choice([1, 1, 1, 2, 5])):
        found = places(tree)
        if not found:
            return hostile(generator)
        container, key = generator.choice(found)
        match generator.randrange(7):
            case 0 | 1:
                container[key] = hostile(generator)
            case 2 if isinstance(container[key], int):
                container[key] += generator.choice([-1, 1, -4, 4, 8, 1 << 20, 1 << 40])
            case 3:
                container.pop(key)
            case 4 if isinstance(container, dict):
                container[generator.choice(["", "__metadata__", key + "x", "\0", "x" * 10_000])] = container[key]
            case 5:
                other, at = generator.choice(found)
                if at in other if isinstance(other, dict) else at < len(other):
                    # Copies, so that nothing comes to contain itself.
                    container[key], other[at] = copy.deepcopy(other[at]), copy.deepcopy(container[key])
            case _:
                for _ in range(generator.choice([1, 10, generator.randrange(900, 1000), 3000])):
                    container[key] = [container[key]] if generator.random() < 0.5 else {"a": container[key]}
    return tree


def mutate_bytes(data: bytes, generator: random.Random) -> bytes:
    """Flipped bits, ranges cut out, doubled or overwritten, a truncation, keys twice, depth, long numbers."""
    at = generator.randrange(len(data) + 1)
    end = min(len(data), at + generator.choice([1, 1, 2, 8, 64]))
    match generator.randrange(8):
        case 0 | 1:
            place = min(at, len(data) - 1)
            return data[:place] + bytes([data[place] ^ 1 << generator.randrange(8)]) + data[place + 1 :]
        case 2:
            return data[:at] + data[end:]
        case 3:
            return data[:at] + data[at:end] * generator.choice([2, 3, 1000]) + data[end:]
        case 4:
            return data[:at] + generator.randbytes(end - at) + data[end:]
        case 5:
            return data[:at]
        case 6:
            # Each object gets its first key twice.
            return data.replace(b"{", b'{"a": 1, "a": 2, ', generator.choice([1, -1]))
        case _:
            token = generator.choice(
                [b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5000, b"NaN", b"-Infinity", b"1e999", b"\xff\xfe"]
            )
            return data[:at] + token + data[end:]


def dump(tree: Any) -> bytes:
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def mutate_json(data: bytes, generator: random.Random) -> bytes:
    if generator.random() < 0.4:
        return mutate_bytes(data, generator)
    try:
        return dump(mutate_tree(json.loads(data), generator))
    except RecursionError:  # too deep for the json of this test
        return data


def mutate_header(data: bytes, generator: random.Random) -> bytes:
    """A safetensors file with another header; mostly with its right length."""
    (length,) = struct.unpack("<Q", data[:8])
    header = mutate_json(data[8 : 8 + length], generator)
    stated = len(header)
    if generator.random() < 0.15:
        stated = generator.choice(
            [0, 1, stated - 1, stated + 1, len(data), 1 << 27, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]
        )
    return struct.pack("<Q", stated & (1 << 64) - 1) + header + data[8 + length :]


def mutate_manifest(data: bytes, generator: random.Random) -> bytes:
    """A manifest with something else in it; mostly with its digest made right again, as a forger would."""
    if generator.random() < 0.25:
        return mutate_json(data, generator)
    raw = json.loads(data)
    try:
        raw["body"] = mutate_tree(raw["body"], generator)
        return seal(raw["body"]).encode()
    except (RecursionError, TypeError):
        return data


# ---- actions with a mutated folder ------------------------------------------------------------------------------


def read_all(found: StoredTensors) -> dict[str, bytes]:
    read = {}
    for name in found.by_name:
        data = found[name].whole()
        assert (data.shape, str(data.dtype)) == (found[name].shape, found[name].dtype)
        read[name] = data.tobytes()
    return read


def open_weights(folder: Path) -> dict[str, bytes]:
    opened = open_folder(folder)
    found = open_tensors(opened)
    check_tensors(opened, layout_of(folder).leaves, found)
    return read_all(found)


def open_config(folder: Path) -> None:
    config = parse_config(open_folder(folder).config)
    assert hash(config) == hash(config)
    layout = model_layout(config)
    assert layout.parameter_count > 0
    assert all(size > 0 for leaf in layout.leaves for size in leaf.source_shape)


def make_folder(work: Path, kind: str) -> tuple[Path, Path]:
    """A folder and the file in it that is to be mutated."""
    source = write_source(work / "source", GPT2 if kind == "gpt2 config" else MICRO)
    if kind == "canonical manifest":
        return (found := to_canonical(source, work / "canonical")), found / MANIFEST_FILE
    if kind == "huggingface manifest":
        write_manifest(open_folder(source), layout_of(source))
        return source, source / MANIFEST_FILE
    if kind == "index":
        names = list(open_tensors(open_folder(source)).by_name)
        (source / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
        return source, source / INDEX_FILE
    return source, source / ("model.safetensors" if kind == "header" else "config.json")


def run(work: Path, kind: str, seed: int, count: int) -> dict[str, int]:
    """Open mutations one after another; any exception but the typed ones ends the process with a traceback."""
    folder, path = make_folder(work, kind)
    original = path.read_bytes()
    is_config = kind.endswith("config")
    expected = None if is_config else open_weights(folder)
    mutate: Callable[[bytes, random.Random], bytes] = (
        mutate_header if kind == "header" else mutate_manifest if "manifest" in kind else mutate_json
    )
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + HEADROOM, used + HEADROOM))
    counts, longest = {"opened": 0, "refused": 0}, 0
    for case in range(count):
        generator = random.Random(f"{kind} {seed} {case}")
        data = mutate(original, generator)
        path.write_bytes(data)
        print(f"case {case}", file=sys.stderr)
        signal.alarm(SECONDS)
        try:
            if is_config:
                open_config(folder)
            elif kind == "header":
                # Without digests, other data of the right shape cannot be distinguished from the right data.
                assert expected is not None
                assert {name: len(value) for name, value in open_weights(folder).items()} == {
                    name: len(value) for name, value in expected.items()
                }
            else:
                assert open_weights(folder) == expected
            counts["opened"] += 1
        except (CheckpointError, ConfigError) as error:
            counts["refused"] += 1
            longest = max(longest, len(str(error)))
        finally:
            signal.alarm(0)
        assert longest < 20_000, f"a message of {longest} characters"
    return counts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated(kind: str, count: int, tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.checkpoints.test_fuzz", str(tmp_path), kind, str(count), str(count)],
        capture_output=True,
        text=True,
        errors="replace",
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "MALLOC_ARENA_MAX": "2"},
        timeout=1800,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    counts = json.loads(process.stdout)
    assert counts["refused"] > count // 3, "mutations do harm"
    assert counts["opened"] > count // 100, "and some do none"
    assert sum(counts.values()) == count


@pytest.mark.parametrize("size", [math.inf, math.nan, "x", None, [1]])
def test_a_size_that_is_no_number(size: object) -> None:
    body = unseal(dump_files({"weights/a": StoredFile(1, "0" * 32)}), "")
    assert body["files"] == {"weights/a": [1, "0" * 32]}
    with pytest.raises(CorruptCheckpointError, match="the list of files is invalid"):
        parse_files(seal(body | {"files": {"weights/a": [size, "0" * 32]}}), "here")


@pytest.mark.parametrize("nested", ["[", '{"a":'])
def test_a_manifest_nested_to_any_depth_is_damaged(nested: str) -> None:
    """Python reads deeper JSON than it writes: at no depth does the difference reach the user."""
    closing = {"[": "]", '{"a":': "}"}[nested]
    limit = sys.getrecursionlimit()  # of which the frames of this test take some
    for depth in range(limit - 400, limit + 10):
        text = '{"body": {"a": ' + nested * depth + "1" + closing * depth + '}, "self": ""}\n'
        with pytest.raises(CorruptCheckpointError, match="its own digest is wrong"):
            unseal(text, "manifest.json")


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
