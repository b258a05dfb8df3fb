"""Completions on standard output, and the line that sums up a run."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Sequence

import numpy as np
from absl import flags

from runtime import Completion, CompletionBuilder, GenerationResult, GenerationStats


def summary(completions: Sequence[Completion], stats: GenerationStats, stopped_by: signal.Signals | None) -> str:
    """Return one line that sums up a run. Tokens are counted without end tokens and the tokens after them."""
    tokens = sum(len(completion.tokens) for completion in completions)
    decoding = max(stats.seconds - stats.compile_seconds, 1e-9)
    parts = [
        f"{tokens} tokens of text in {stats.seconds:.2f} s",
        f"{stats.compile_seconds:.1f} s of them compiling" if stats.compiled_programs else "nothing compiled",
        f"{stats.forwards} forward passes, {tokens / decoding:.1f} tokens/s",
    ]
    if stats.row_passes:
        per_pass = stats.accepted_steps / stats.row_passes
        parts.append(f"{stats.accepted_steps} steps accepted from drafts, {per_pass:.2f} per pass of a row")
    if stats.masks_left:
        parts.append(f"{stats.masks_left} masks left")
    return (f"stopped by {stopped_by.name}: " if stopped_by is not None else "") + "; ".join(parts)


def write_completions(
    completions: Sequence[Completion], titles: Sequence[str], result: GenerationResult, values: flags.FlagValues
) -> None:
    """Print completions on standard output, as text or JSON lines."""
    stats = dataclasses.asdict(result.stats)
    for completion, title in zip(completions, titles, strict=True):
        if values.json:
            print(json.dumps(dataclasses.asdict(completion) | {"stats": stats}, ensure_ascii=False))
            continue
        if len(completions) > 1:
            print(f"=== {title} ===")
        print(completion.text if values.chat else completion.whole_text)
    sys.stdout.flush()


def write_unfinished(
    rows: Sequence[Sequence[int]], titles: Sequence[str], completions: CompletionBuilder, stop: Sequence[str]
) -> None:
    """Print the text so far of every row on standard output. It ends where the row's completion ends."""
    for title, tokens in zip(titles, rows, strict=True):
        text = completions.build(np.array(tokens, np.int32), (), stop=stop).text
        print(f"=== {title} ===\n{text}")
