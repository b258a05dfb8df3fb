"""Indexes possibly harmful pickles, in a process with a memory limit and an audit hook.

``python -m tests.checkpoints.pickle_worker FOLDER SEED COUNT`` indexes mutated pickles, and
``python -m tests.checkpoints.pickle_worker FILE`` measures the cost of one. Both print one JSON object.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import re
import resource
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.legacy import LegacyPickle, LegacyPickleError, LegacyTensor, index_pickle
from checkpoints.legacy.walker import OPCODES
from tests.checkpoints.hostile_pickles import HOSTILE
from tests.checkpoints.pickles import assert_reads, key, operations

HEADROOM = 256 << 20  # address space that indexing may use in addition to that of the process at its start


class Watch:
    """An audit hook that allows indexing to open its file for reading and to map it, and nothing else."""

    def __init__(self) -> None:
        self.is_on = False
        self.seen: list[str] = []
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event == "mmap.__new__" or (event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return
        self.seen.append(f"{event} {arguments}"[:200])
        raise PermissionError(self.seen[-1])

    def __enter__(self) -> None:
        self.is_on = True

    def __exit__(self, *_: object) -> None:
        self.is_on = False


class PureUnpickler(pickle.Unpickler):
    """The standard unpickler with the same allow-list, as the reference for accepted files."""

    def find_class(self, module: str, name: str) -> Any:
        def jax_array(function: Any, arguments: Any, state: Any, _: Any) -> np.ndarray:
            array = function(*arguments)
            array.__setstate__(state)
            return array

        allowed = {
            "ndarray": np.ndarray,
            "dtype": np.dtype,
            "_reconstruct": np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
            "_frombuffer": np._core.numeric._frombuffer,
            "_reconstruct_array": jax_array,
            "FrozenDict": dict,
        }
        return allowed[name] if module != "ml_dtypes" else getattr(ml_dtypes, name)


def check_index(path: Path, data: bytes, tensors: dict[str, LegacyTensor]) -> None:
    """Check that the index of an accepted file equals the unpickler's result, with every array inside the file."""
    assert_reads(path, PureUnpickler(io.BytesIO(data)).load())
    for tensor in tensors.values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= len(data)
    with LegacyPickle(path) as weights:
        for name, tensor in tensors.items():
            stored = sorted(data[tensor.offset : tensor.offset + tensor.nbytes])
            assert sorted(weights.read(name).tobytes()) == stored


CALLS = [
    b"cos\nsystem\n" + key("touch canary") + b"\x85R",
    key("posix") + key("system") + b"\x93" + key("touch canary") + b"\x85R",
    key("builtins") + key("exec") + b"\x93" + key("open('canary', 'w')") + b"\x85R",
    b"(" + key("touch canary") + b"ios\nsystem\n",
    b"(cos\nsystem\n" + key("touch canary") + b"o",
    b"cbuiltins\nobject\n)\x81",
    b"Pcanary\n",
    b"\x82\x01",
    b"\x97\x98",
    b"\x8e" + (1 << 40).to_bytes(8, "little"),
    b"r\xff\xff\xff\x7f",
    b"(" * 50,
    b"}" * 50,
    b"0",
    b"2",
]


CHANGES = [
    "flip",
    "flip",
    "flip",
    "replace",
    "opcode",
    "number",
    "delete",
    "duplicate",
    "swap",
    "call",
    "splice",
    "cut",
]


def mutate(generator: random.Random, seeds: list[bytes]) -> bytes:
    """Return a seed file with one to four changes to its bytes or operations."""
    data = generator.choice(seeds)
    for _ in range(generator.choice([1, 1, 1, 2, 4])):
        pieces, join = [data[place : place + 1] for place in range(len(data))], b"".join
        if generator.random() < 0.5:  # whole operations, while it is still a pickle
            with contextlib.suppress(ValueError):
                pieces = [raw for _, _, raw in operations(data)]
        first = generator.randrange(len(pieces))
        last = first + min(generator.choice([1, 1, 1, 2, 3, 8, 50]), len(pieces) - first)
        other = generator.choice(seeds)
        place = generator.randrange(len(other))
        changed = {
            "flip": [bytes([byte ^ (1 << generator.randrange(8)) for byte in pieces[first]])],
            "replace": [bytes([generator.randrange(256)])],
            "opcode": [bytes([generator.choice(list(OPCODES))]) + pieces[first][1:]],
            "number": [pieces[first][:1] + generator.choice([bytes(4), b"\xff" * 4, b"\xff" * 8, b"\x01"])],
            "delete": [],
            "duplicate": pieces[first:last] * 2,
            "swap": pieces[first:last][::-1],
            "call": [generator.choice(CALLS), *pieces[first:last]],
            "splice": [other[place : place + generator.randrange(1, 60)], *pieces[first:last]],
            "cut": None,
        }[generator.choice(CHANGES)]
        data = join(pieces[:first] if changed is None else [*pieces[:first], *changed, *pieces[last:]])
        if not data:
            break
    return data


def fuzz(folder: Path, seed: int, count: int, watch: Watch) -> dict[str, Any]:
    """Index every hostile file and ``count`` mutated ones. Any result but our error or a correct index raises."""
    with watch, contextlib.suppress(PermissionError):
        os.system("touch canary")
    assert watch.seen, "the audit hook sees nothing"
    watch.seen.clear()
    generator = random.Random(seed)
    seeds = [path.read_bytes() for path in sorted((folder / "seeds").iterdir())]
    path = folder / "mutated.pkl"
    accepted, messages = 0, set()
    hostile = [data for data, _ in HOSTILE.values()]
    for number in range(count + len(hostile) + len(seeds)):
        if number < len(seeds):
            data = seeds[number]
        elif number < len(seeds) + len(hostile):
            data = hostile[number - len(seeds)]
        else:
            data = mutate(generator, seeds)
        path.write_bytes(data)
        tensors = None
        try:
            with watch:
                tensors = index_pickle(path)
        except LegacyPickleError as error:
            messages.add(re.sub(r"[0-9]+", "#", str(error).split(": ", 2)[1])[:12])
        except BaseException:
            (folder / "failing.pkl").write_bytes(data)
            raise
        if tensors is not None:
            accepted += 1
            try:
                check_index(path, data, tensors)
            except BaseException:
                (folder / "failing.pkl").write_bytes(data)
                raise
    return {"accepted": accepted, "indexed": number + 1, "messages": sorted(messages), "seen": watch.seen}


def measure(path: Path, watch: Watch) -> dict[str, Any]:
    """Measure the cost of indexing a large file, and of reading it array by array."""
    tracemalloc.start()
    reset_peak()
    before, started = resident_peak(), time.process_time()  # however busy the machine is
    with watch:
        tensors = index_pickle(path)
    record: dict[str, Any] = {
        "seconds": time.process_time() - started,
        "allocated": tracemalloc.get_traced_memory()[1],
        "resident": resident_peak() - before,
    }
    tracemalloc.stop()
    with LegacyPickle(path) as weights:
        for name in weights.tensors:
            assert weights.read(name).shape == tensors[name].shape
    return record | {"tensors": len(tensors), "resident_of_reading": resident_peak() - before}


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def resident_peak() -> int:
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main(target: Path, *numbers: str) -> None:
    watch = Watch()
    if target.is_file():
        print(json.dumps(measure(target, watch)))
        return
    os.chdir(target)
    limit = address_space() + HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print(json.dumps(fuzz(target, int(numbers[0]), int(numbers[1]), watch)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
