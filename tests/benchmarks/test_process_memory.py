"""The peak of a process is its own, whatever process started it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from benchmarks.process_memory import peak_resident_bytes

CHILD = """
from benchmarks.process_memory import peak_resident_bytes
before = peak_resident_bytes()
held = bytearray(100 << 20)
print(before, peak_resident_bytes())
"""


def test_the_peak_of_a_child_is_its_own() -> None:
    held = np.ones(300 << 20, np.uint8)
    assert peak_resident_bytes() > held.nbytes
    printed = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True).stdout
    before, after = map(int, printed.split())
    assert 0 < before < held.nbytes
    assert after - before > 90 << 20
