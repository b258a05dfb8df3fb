"""Messages about optional dependencies that are not installed."""

from __future__ import annotations

import subprocess
import sys

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
