"""Limits on requests and connections, set by flags, and the limit on open files that the connections need."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from runtime import InputError

# Number of open files besides connections: weights, devices, logs.
_OTHER_FILES = 128


@dataclass(frozen=True)
class Limits:
    """Limits on what clients may send and on how long things may take.

    Attributes:
      body: maximum size of a request's body in bytes.
      headers: maximum size of a request's head (path, query and headers) in bytes.
      rows: maximum number of completions or scored rows per request.
      queue: maximum number of rows that wait for a slot, over all requests.
      connections: maximum number of open connections.
      request_seconds: maximum seconds from the arrival of a request to its end. A request can set a shorter timeout.
      read_seconds: seconds in which a request's head must arrive, and then its body.
      write_seconds: seconds in which a client must read the next 256 KB of a response, or its rest.
      stall_seconds: seconds that one engine step, or reading one body, may take before ``/health`` reports a stall.
      grace_period: seconds in which to finish accepted requests after SIGTERM.
    """

    body: int = 1 << 20
    headers: int = 16 << 10
    rows: int = 32
    queue: int = 64
    connections: int = 1024
    request_seconds: float = 600.0
    read_seconds: float = 10.0
    write_seconds: float = 30.0
    stall_seconds: float = 60.0
    grace_period: float = 30.0


def allow_files(connections: int) -> None:
    """Raise this process's limit on open files as far as allowed, and check that it suffices.

    Args:
      connections: maximum number of open connections, each of which takes one file.

    Raises:
      InputError: the limit is too low for the connections.
    """
    if sys.platform == "win32":  # no such limit
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    # Without a hard limit, the kernel has a limit of its own that it does not report.
    allowed = wanted if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raise InputError(
            f"--max_connections={connections} needs {wanted} open files, but ulimit -n allows {soft}: raise that "
            f"limit, or pass --max_connections={max(1, soft - _OTHER_FILES)}"
        )
