"""Two folders exchange their names in one step, where the system can do that."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# Of systems and file systems that cannot.
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


@functools.cache
def _renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    """Linux's renameat2, None where the C library has none."""
    found = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return found


def exchange(one: Path, other: Path) -> bool:
    """Give each of two folders of one file system the name of the other; at every moment both names are there.

    Returns:
      False where that cannot be done here; nothing has happened then.

    Raises:
      OSError: it fails for any other reason.
    """
    rename = _renameat2()
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))
