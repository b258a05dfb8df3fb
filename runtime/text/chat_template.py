"""Chat templates, rendered in child processes: a template is a program of whoever made the checkpoint.

transformers' sandbox keeps a template from reading files and from running code. It does not keep it from looping for
ever or from filling the memory. A child process can be ended whatever it does; a thread cannot.
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

from sharding.errors import InputError

# To render a conversation; templates take milliseconds.
RENDER_SECONDS = 5.0
_START_SECONDS = 120.0
# After a child should have ended by itself.
_KILL_SECONDS = 1.0
_MAX_ANSWER_BYTES = 256 << 20
_REFUSED = "messages: the chat template refuses them"
_PROGRAM = Path(__file__).with_name("render_process.py")


class TemplateTimeoutError(InputError):
    """A template that does not end in time, or takes too much memory."""


class TemplateRenderer:
    """Child processes that render chat templates, as many as there are renderings at a time. Thread-safe.

    They start when they are first needed, or with :meth:`start`, and end with this object or this process.
    """

    def __init__(self, seconds: float = RENDER_SECONDS) -> None:
        """Take the seconds in which a conversation must be rendered."""
        self._seconds = seconds
        self._idle: list[_Child] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _end_all, self._idle)

    def start(self) -> None:
        """Start a child, so that the first conversation need not wait for it."""
        self._give_back(_Child())

    def render(
        self,
        template: str,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        special_tokens: Mapping[str, Any],
        answer: bool,
    ) -> list[str]:
        """The texts of conversations.

        Args:
          template: a Jinja template, with what transformers offers to one.
          conversations: messages, ``{"role", "content"}`` each.
          special_tokens: texts of the tokenizer's special tokens by name, for the template.
          answer: whether the assistant's answer begins at the end.

        Raises:
          TemplateTimeoutError: the template does not end in time.
          InputError: the template refuses the messages of a conversation, is none, or fails.
        """
        request = {
            **special_tokens,
            "conversations": [list(messages) for messages in conversations],
            "chat_template": template,
            "add_generation_prompt": answer,
            "seconds": self._seconds,
        }
        with self._lock:
            child = self._idle.pop() if self._idle else None
        child = child or _Child()
        try:
            child.wait_until_ready()
            said = child.ask(json.dumps(request, default=str).encode(), self._seconds + _KILL_SECONDS)
        except EOFError as error:
            child.end()
            why = f"it does not end within {self._seconds:g} s, or takes too much memory"
            raise TemplateTimeoutError(_REFUSED, field="messages", detail=why) from error
        except BaseException:
            child.end()
            raise
        self._give_back(child)
        if "texts" not in said:
            raise InputError(_REFUSED, field="messages", detail=said.get("error"))
        return list(said["texts"])

    def _give_back(self, child: _Child) -> None:
        with self._lock:
            self._idle.append(child)


class _Child:
    """A process that renders one conversation at a time."""

    def __init__(self) -> None:
        own = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                # -P: modules beside the program must not hide others.
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **own},
                start_new_session=True,  # an interrupt from the keyboard is this process's
            )
        except OSError as error:
            raise InputError(f"the process that renders chat templates cannot be started ({error})") from error
        self._is_ready = False

    def wait_until_ready(self) -> None:
        """Wait until it has imported what it needs.

        Raises:
          InputError: it cannot.
        """
        if not self._is_ready:
            try:
                self._exchange(b"", _START_SECONDS)
            except EOFError as error:
                raise InputError("the process that renders chat templates has failed to start") from error
            self._is_ready = True

    def ask(self, request: bytes, seconds: float) -> dict[str, Any]:
        """Its answer to a request.

        Raises:
          EOFError: it has ended, or has been ended because it took longer than ``seconds``.
        """
        return dict(json.loads(self._exchange(request + b"\n", seconds)))

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
        """End the process, whatever it does."""
        self._process.kill()
        for pipe in (self._process.stdout, self._process.stdin):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not sent any more
                pipe.close()
        self._process.wait()


def _end_all(children: list[_Child]) -> None:
    for child in children:
        child.end()
