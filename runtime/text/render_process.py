"""The program of the child process that renders chat templates; :mod:`runtime.text.chat_template` starts it.

A template that loops forever or fills the memory ends only this process. The program reads one JSON object per line
from standard input: the arguments of transformers' ``render_jinja_template``, and a time limit ``seconds``. For each
of them, it writes one line with a JSON object that has ``texts`` or an ``error``. An empty object at the start says
that the process is ready.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

# Memory that rendering may use, in addition to the memory of the process when it is ready.
_MEMORY_BYTES = 1 << 30
_MAX_CHARACTERS = 1 << 24


def _bound_memory() -> None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
    except OSError:  # a system without /proc
        return
    limit = pages * resource.getpagesize() + _MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _render(render: Any, request: dict[str, Any]) -> dict[str, Any]:
    # SIGALRM ends the process by default, even during a call into C code.
    signal.setitimer(signal.ITIMER_REAL, request.pop("seconds"))
    try:
        texts, _ = render(**request)
    except Exception as error:  # a template can raise any exception
        return {"error": f"{type(error).__name__}: {error!s:.300}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if max(map(len, texts)) > _MAX_CHARACTERS:
        return {"error": f"the rendered text has more than {_MAX_CHARACTERS} characters"}
    return {"texts": texts}


def main() -> None:
    """Render the conversations of each request line, and write a response line, until standard input ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print goes to stderr, so that it is not mistaken for an answer
    from transformers.utils.chat_template_utils import render_jinja_template

    _bound_memory()
    out.write(b"{}\n")
    out.flush()
    for line in sys.stdin.buffer:
        out.write(json.dumps(_render(render_jinja_template, json.loads(line))).encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
