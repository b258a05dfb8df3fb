"""Renders chat templates in a process of its own: a template that does not end, or fills the memory, ends this alone.

:mod:`runtime.text.chat_template` starts it. It reads a JSON object a line from standard input, the arguments of
transformers' ``render_jinja_template`` and ``seconds`` to do it in, and writes an object a line: ``texts``, or an
``error``. An empty object says that it is ready.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

# Beside what the process has when it is ready.
_MEMORY_BYTES = 1 << 30
_MAX_CHARACTERS = 1 << 24


def _bound_memory() -> None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
    except OSError:  # a system without such files
        return
    limit = pages * resource.getpagesize() + _MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _render(render: Any, request: dict[str, Any]) -> dict[str, Any]:
    # What this signal does by default ends the process, even within one call of C.
    signal.setitimer(signal.ITIMER_REAL, request.pop("seconds"))
    try:
        texts, _ = render(**request)
    except Exception as error:  # a template can raise whatever Python can
        return {"error": f"{type(error).__name__}: {error!s:.300}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if max(map(len, texts)) > _MAX_CHARACTERS:
        return {"error": f"it makes a text of more than {_MAX_CHARACTERS} characters"}
    return {"texts": texts}


def main() -> None:
    """Render until standard input ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that a library prints is taken for an answer
    from transformers.utils.chat_template_utils import render_jinja_template

    _bound_memory()
    out.write(b"{}\n")
    out.flush()
    for line in sys.stdin.buffer:
        out.write(json.dumps(_render(render_jinja_template, json.loads(line))).encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
