"""The memory of this process."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path


def peak_resident_bytes() -> int:
    """Return the largest resident size of this process so far, in bytes.

    Linux's ``ru_maxrss`` includes the size that the parent had when it started this process, so it is read only where
    ``/proc/self/status`` has no ``VmHWM``.
    """
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return 1024 * int(found[1])
    # Kilobytes on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
