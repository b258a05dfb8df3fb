"""A real browser for the tests of pages: finds Chromium, which Playwright drives."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest

# With this variable set, no test is skipped because the browser or its driver is missing.
_REQUIRED = os.environ.get("DIFFUMESH_REQUIRE_BROWSER") == "1"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium_path() -> str:
    """Return the path of Chromium. If there is none, the test is skipped, or fails where a browser is required."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    return found or _lacks("the page is tested in Chromium, and there is none on PATH (Debian: apt install chromium)")


@contextmanager
def chromium() -> Iterator[Any]:
    """Run a browser that Playwright drives. If either is missing, the test is skipped or fails."""
    path = chromium_path()
    try:
        playwright = importlib.import_module("playwright.sync_api")
    except ImportError:
        _lacks("the page is tested in a browser, which playwright drives (pip install playwright)")
    with (
        playwright.sync_playwright() as driver,
        driver.chromium.launch(executable_path=path, args=["--no-sandbox"]) as browser,
    ):
        yield browser


def _lacks(what: str) -> NoReturn:
    (pytest.fail if _REQUIRED else pytest.skip)(what)
