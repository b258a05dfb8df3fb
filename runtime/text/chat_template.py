"""Rendering of chat templates in child processes.

A chat template is a program that comes with the checkpoint. The sandbox of transformers prevents a template from
reading files and running code, but not from looping forever or filling the memory. Unlike a thread, a child process can
be ended in such cases.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoints.local_files import parse_json_object
from sharding.errors import InputError

# Time limit for rendering; ordinary templates take milliseconds.
RENDER_SECONDS = 5.0
_START_SECONDS = 120.0
# A child ends itself at the time limit. If it does not, it is killed after this many more seconds.
_KILL_SECONDS = 1.0
_MAX_ANSWER_BYTES = 256 << 20
_REFUSED = "messages: the chat template cannot render them"
_PROGRAM = Path(__file__).with_name("render_process.py")
# Variables that Python and a template's date need. Others may be secrets, such as HF_TOKEN, and templates come from
# others.
_PASSED_ON = ("PATH", "HOME", "LANG", "TZ", "TZDIR", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SYSTEMROOT")
_PASSED_PREFIXES = ("LC_", "PYTHON")


def _is_passed_on(name: str) -> bool:
    return name in _PASSED_ON or name.startswith(_PASSED_PREFIXES)


class TemplateTimeoutError(InputError):
    """A chat template did not finish within the time limit, or used too much memory."""


class RendererStartError(InputError):
    """The process that renders chat templates cannot start, for a reason that is not in the input."""


class TemplateRenderer:
    """A pool of child processes that render chat templates. It is thread-safe.

    There is one child per concurrent call. Children start when they are first needed, or with :meth:`start`, and end
    with this object or this process.
    """

    def __init__(self, seconds: float = RENDER_SECONDS) -> None:
        """Set the time limit, in seconds, for one call of :meth:`render`."""
        self._seconds = seconds
        self._idle: list[_Child] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _end_all, self._idle)

    def start(self) -> None:
        """Start a child, so that the first call of :meth:`render` does not have to wait for it."""
        self._give_back(_Child())

    def render(
        self,
        template: str,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        special_tokens: Mapping[str, Any],
        answer: bool,
    ) -> list[str]:
        """Render conversations to texts.

        Args:
          template: a Jinja template with the extensions of transformers.
          conversations: lists of messages, each ``{"role": ..., "content": ...}``.
          special_tokens: texts of the tokenizer's special tokens by name, for the template.
          answer: append the beginning of the assistant's answer.

        Raises:
          TemplateTimeoutError: rendering timed out.
          InputError: the template is invalid, fails, or rejects the messages of a conversation.
          RendererStartError: its process cannot start.
        """
        request = {
            **special_tokens,
            "conversations": [list(messages) for messages in conversations],
            "chat_template": template,
            "add_generation_prompt": answer,
            "seconds": self._seconds,
        }
        child = self._take()
        try:
            child.wait_until_ready()
            said = child.ask(json.dumps(request, default=str).encode(), self._seconds + _KILL_SECONDS)
        except EOFError as error:
            child.end()
            why = f"it did not finish within {self._seconds:g} s, or used too much memory"
            raise TemplateTimeoutError(_REFUSED, field="messages", detail=why) from error
        except BaseException:
            child.end()
            raise
        self._give_back(child)
        if "texts" not in said:
            raise InputError(_REFUSED, field="messages", detail=said.get("error"))
        return list(said["texts"])

    def _take(self) -> _Child:
        """Return an idle child, or start one. Children that were killed while they were idle are dropped."""
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.is_running:
                    return child
                child.end()
        return _Child()

    def _give_back(self, child: _Child) -> None:
        with self._lock:
            self._idle.append(child)


class _Child:
    """A child process that handles one request at a time."""

    def __init__(self) -> None:
        own = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                # -P keeps the program's folder off Python's path, where its modules would shadow others.
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if _is_passed_on(name)} | own,
                start_new_session=True,  # so that Ctrl+C reaches only the parent
            )
        except OSError as error:
            raise RendererStartError(f"cannot start the process that renders chat templates ({error})") from error
        self._is_ready = False

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Wait until the child process has imported its libraries.

        Raises:
          RendererStartError: the process failed to start.
        """
        if not self._is_ready:
            try:
                self._exchange(b"", _START_SECONDS)
            except EOFError as error:
                raise RendererStartError("the process that renders chat templates failed to start") from error
            self._is_ready = True

    def ask(self, request: bytes, seconds: float) -> dict[str, Any]:
        """Send a request and return the child's answer.

        Raises:
          EOFError: the child has ended, or was killed because it took longer than ``seconds``.
        """
        return parse_json_object(self._exchange(request + b"\n", seconds))

    def _exchange(self, request: bytes, seconds: float) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(seconds, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
            line = self._process.stdout.readline(_MAX_ANSWER_BYTES)
        except OSError as error:
            raise EOFError from error
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            raise EOFError
        return line

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        for pipe in (self._process.stdout, self._process.stdin):
            assert pipe is not None
            with contextlib.suppress(OSError):  # unsent data is dropped
                pipe.close()
        self._process.wait()


def _end_all(children: list[_Child]) -> None:
    for child in children:
        child.end()
