"""Helpers that run small batches with the demo checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch import batch


def write(path: Path, lines: Sequence[dict[str, Any] | str]) -> Path:
    """Write these lines to a file."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def arguments(source: Path, output: Path | str, compiled: str, *more: str) -> list[str]:
    """Return the flags of a short run."""
    common = ["--max_new_tokens=4", f"--compile_cache={compiled}", "--temperature=0.8"]
    return [f"--input={source}", f"--output_dir={output}", *common, *more]


def launch(source: Path, output: Path | str, compiled: str, *more: str) -> None:
    """Run the command in this process, on all simulated devices."""
    batch.run(["batch", *arguments(source, output, compiled, *more)])


def results(output: Path) -> list[dict[str, Any]]:
    """Read the complete records of an output folder, without a line that is only partly written."""
    path = output / "results.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]
