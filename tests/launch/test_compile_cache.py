"""The folder of compiled programs on several hosts, which are threads here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import pytest

from launch.hosts.host import Host
from launch.process.compile_cache import drop_unusable

HOSTS = 3


class Thread(Host):
    """One of ``HOSTS`` hosts."""

    count = HOSTS

    def __init__(self, index: int, barrier: threading.Barrier, said: dict[int, Any]) -> None:
        super().__init__()
        self.process_index, self._barrier, self._said = index, barrier, said

    def gather(self, topic: str, value: Any) -> list[Any]:
        self._said[self.process_index] = value
        self._barrier.wait()
        found = [self._said[index] for index in range(HOSTS)]
        self._barrier.wait()
        return found


@pytest.mark.parametrize(
    ("platform", "names", "kept"),
    [
        ("gpu", ("shared", "shared", "shared"), True),
        ("gpu", ("shared", "own", "shared"), False),
        ("gpu", ("shared", None, "shared"), False),
        ("gpu", (None, "shared", "shared"), False),
        ("gpu", ("missing", "missing", "missing"), False),
        ("tpu", ("shared", "own", "other"), True),
        ("cpu", ("shared", "shared", "shared"), False),
    ],
)
def test_which_hosts_may_use_it(
    platform: str,
    names: tuple[str | None, ...],
    kept: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a folder of their own each, GPU hosts would wait for one that does not compile; see XLA's autotuning."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    updates: list[Any] = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: updates.append((name, value)))
    for name in ("shared", "own", "other"):
        (tmp_path / name).mkdir()
    barrier, said = threading.Barrier(HOSTS, timeout=30), {}  # type: ignore[var-annotated]
    folders = [None if name is None else tmp_path / name for name in names]
    with ThreadPoolExecutor(HOSTS) as pool:
        list(pool.map(lambda index: drop_unusable(folders[index], Thread(index, barrier, said)), range(HOSTS)))
    assert updates == ([] if kept else [("jax_compilation_cache_dir", None)] * HOSTS)
    assert not list(tmp_path.rglob("*/*")), "no file is left"
    warned = "the hosts have no common --compile_cache" in capsys.readouterr().err
    assert warned == (platform == "gpu" and not kept and folders[0] is not None)
