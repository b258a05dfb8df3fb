"""Checks how a command reports a user's mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def refusal(capsys: pytest.CaptureFixture[str], start: Callable[[], None]) -> str:
    """Return a command's standard error, after a check of exit code 2 and one error without a traceback."""
    with pytest.raises(SystemExit) as stop:
        start()
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("error: ") == 1
    assert "Traceback" not in captured.err
    return captured.err
