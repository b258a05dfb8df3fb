"""Messages about optional dependencies that are not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

HIDE = "import sys; sys.modules['lm_eval'] = None; import runpy; "


def test_the_harness_adapter_says_what_to_install() -> None:
    code = f"{HIDE}runpy.run_module('launch.lm_eval_adapter', run_name='__main__')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    assert found.stderr.startswith("error: the adapter needs lm-evaluation-harness")
    assert "pip install -e '.[eval]' in the checkout" in found.stderr
    assert "Traceback" not in found.stderr
    code = f"{HIDE}import launch.lm_eval_adapter"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stderr.splitlines()[-1].startswith("ImportError: the adapter needs")


def without_httpx(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark where httpx is not installed."""
    code = f"import sys, runpy; sys.modules['httpx'] = None; runpy.run_module({module!r}, run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)


def test_reports_need_no_client() -> None:
    found = without_httpx("benchmarks.report", "--folder=/nowhere")
    assert (found.returncode, found.stderr) == (2, "error: --folder=/nowhere: there is no such folder\n")


@pytest.mark.parametrize("name", ["overload", "serve"])
def test_benchmarks_of_a_server_say_what_to_install(name: str) -> None:
    found = without_httpx(f"benchmarks.{name}")
    hint = "error: benchmarks of a server need httpx: pip install -e '.[bench,serve]' in the checkout\n"
    assert (found.returncode, found.stderr) == (2, hint)
