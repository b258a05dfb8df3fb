"""Tests run on simulated CPU devices; TPU programs are compiled ahead of time, without a TPU."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tests.compilation import QUICK_FLAGS, without_slow_passes

# libtpu reads these when it is loaded: describe a slice instead of looking for one.
os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-8",
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    HF_HUB_OFFLINE="1",
    # Programs without the Python frames of their operations are compiled in less time.
    JAX_TRACEBACK_IN_LOCATIONS_LIMIT="0",
)
# Commands keep compiled programs in one folder, which all tests of a run share, and their child processes.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _caches = tempfile.TemporaryDirectory(prefix="diffumesh_tests_")
    os.environ["XDG_CACHE_HOME"] = _caches.name
# Child processes use it too. `XLA_FLAGS= pytest` compiles everything with XLA's defaults.
os.environ.setdefault("XLA_FLAGS", QUICK_FLAGS)

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_num_cpu_devices", 16)
# Tracing makes many objects and little garbage, for which Python's default thresholds look too often.
gc.set_threshold(200_000, 20, 100)

_START = time.monotonic()
# Regions of memory that a process has mapped, above which programs are dropped; Linux allows 65,530.
_MANY_REGIONS = 40_000
_SECONDS_BETWEEN_COUNTS = 5.0
_counted = _START


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that select some of the slow tests; see :func:`pytest_collection_modifyitems`."""
    group = parser.getgroup("diffumesh")
    group.addoption(
        "--slow-quarter", type=int, metavar="DAY", help="Of the slow tests one quarter, which is another one each day."
    )
    group.addoption(
        "--begin-within", type=_seconds, metavar="TIME", help="Skip, and name, the tests that would begin after this."
    )
    group.addoption(
        "--end-within", type=_seconds, metavar="TIME", help="Stop, and name as skipped, the tests that run until then."
    )


def _seconds(text: str) -> float:
    """Read a time since the start of the run, in minutes, or in seconds if it ends with ``s``."""
    return float(text[:-1]) if text.endswith("s") else 60 * float(text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one quarter of each file's slow tests.

    A quarter consists of adjacent tests, which share fixtures and compiled programs. The file's name determines its
    first quarter, so that files with a single slow test are spread over the four quarters.
    """
    day = config.getoption("--slow-quarter")
    if day is None:
        return
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is not None:
            files[_file(item)].append(item)
    kept = {
        id(item)
        for name, slow in files.items()
        for place, item in enumerate(slow)
        if (4 * place // len(slow) + zlib.crc32(name.encode())) % 4 == day % 4
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    # The same quarter begins with another third of the files four days later, because a run may have no time for all.
    order, third = list(files), day // 4 % 3 * len(files) // 3
    place = {name: index for index, name in enumerate([*order[third:], *order[:third]])}
    items[:] = sorted((item for item in items if id(item) in kept), key=lambda item: place[_file(item)])


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Skip a test for which ``--begin-within`` leaves no time. The reason names it: ``-rs`` shows no other name."""
    seconds = item.config.getoption("--begin-within")
    if seconds is not None and time.monotonic() - _START > seconds:
        pytest.skip(f"{item.nodeid} has not begun within {seconds:g} seconds")
    with _stopped_in_time(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Stop a test that runs until the time of ``--end-within``."""
    with _stopped_in_time(item):
        return (yield)


@contextmanager
def _stopped_in_time(item: pytest.Item) -> Iterator[None]:
    seconds = item.config.getoption("--end-within")
    if seconds is None:
        yield
        return

    def stop(*_: object) -> None:
        pytest.skip(f"{item.nodeid} has not ended within {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(0.01, _START + seconds - time.monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True, scope="session")
def _programs_are_compiled_quickly() -> Iterator[None]:
    with without_slow_passes() if os.environ["XLA_FLAGS"] == QUICK_FLAGS else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _no_compilation_cache_left_behind() -> Iterator[None]:
    """Reset the compile cache that a command may set in this process, so that later tests do not use it."""
    yield
    if jax.config.jax_compilation_cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def _programs_do_not_pile_up() -> Iterator[None]:
    """Drop cached engines and programs before the process has too many memory mappings, at which XLA on CPU crashes.

    XLA maps a few regions of memory per program. The next test makes its own engine. Counting takes up to 30 ms.
    """
    global _counted
    yield
    if time.monotonic() - _counted > _SECONDS_BETWEEN_COUNTS:
        _drop_programs(_MANY_REGIONS)
        _counted = time.monotonic()


@pytest.fixture(autouse=True, scope="module")
def _programs_of_other_files_are_dropped() -> None:
    """Make room between files, which share few programs, so that no test has to compile its file's programs again."""
    _drop_programs(_MANY_REGIONS // 2)


def _drop_programs(most: int) -> None:
    """Drop cached engines and programs if the process has mapped at least ``most`` regions of memory."""
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") < most:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("tests"):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    jax.clear_caches()
    gc.collect()
