"""Completions on standard output, and the line that sums up a run."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from runtime import Completion, CompletionBuilder, GenerationResult, GenerationStats


def summary(
    completions: Sequence[Completion], result: GenerationResult, prompt: int, stopped_by: signal.Signals | None
) -> str:
    """Return one line that sums up a run. Tokens of text are without end tokens and the tokens after them.

    Args:
      completions: the completions of the result.
      result: the generated rows.
      prompt: S, length of the padded prompts.
      stopped_by: the signal that ended the rows early; None if none did.
    """
    stats = result.stats
    tokens = sum(len(completion.tokens) for completion in completions)
    decoding = max(stats.seconds - stats.compile_seconds, 1e-9)
    parts = [
        f"{tokens} tokens of text in {stats.seconds:.2f} s"
        + (f", of which {stats.compile_seconds:.1f} s compiling" if stats.compiled_programs else ""),
        f"{stats.forwards} forward passes, {tokens / decoding:.1f} tokens/s"
        + (" after compiling" if stats.compiled_programs else ""),
    ]
    if stats.row_passes:
        per_pass = stats.accepted_steps / stats.row_passes
        parts.append(f"{stats.accepted_steps} steps accepted from drafts, {per_pass:.2f} per pass of a row")
    if stats.masks_left:
        parts.append(f"{stats.masks_left} masks left")
    if stopped_by is None:
        return "; ".join(parts)
    new = result.commit_steps[:, prompt:]
    committed = f"{int((new >= 0).sum())} of {new.size} new tokens committed, printed up to the first open position"
    return f"stopped by {stopped_by.name}: " + "; ".join([committed, *parts])


def write_completions(
    completions: Sequence[Completion], titles: Sequence[str], stats: GenerationStats | None, values: flags.FlagValues
) -> None:
    """Print completions on standard output, as text or JSON lines. Without ``stats``, they are unfinished."""
    unknown = {"masks_left": None, "stats": None}
    more: dict[str, Any] = unknown if stats is None else {"stats": dataclasses.asdict(stats)}
    for completion, title in zip(completions, titles, strict=True):
        if values.json:
            print(json.dumps(dataclasses.asdict(completion) | more, ensure_ascii=False))
            continue
        if len(completions) > 1:
            print(f"=== {title} ===")
        print(completion.text if values.chat else completion.whole_text)
    sys.stdout.flush()


def write_unfinished(
    rows: Sequence[Sequence[int]],
    prompts: Sequence[str],
    titles: Sequence[str],
    seeds: Sequence[int],
    builder: CompletionBuilder,
    values: flags.FlagValues,
) -> int:
    """Print the text so far of every row, as completions are printed. Returns its number of tokens.

    A text ends where the row's completion ends. In JSON, the numbers that only a result has are null.

    Args:
      rows: for each row, its new tokens before the first mask.
      prompts: texts of the prompts, which all have the same number of rows.
      titles: titles of the rows.
      seeds: seeds of the rows.
      builder: builds the completions.
      values: the flags of ``diffumesh generate``.
    """
    samples = len(rows) // len(prompts)
    completions = [
        builder.build(
            np.array(tokens, np.int32),
            (),
            prompt=prompts[row // samples],
            suffix=values.suffix[row // samples] if values.suffix else "",
            index=row % samples,
            seed=seed,
            stop=values.stop,
        )
        for row, (tokens, seed) in enumerate(zip(rows, seeds, strict=True))
    ]
    write_completions(completions, titles, None, values)
    return sum(len(completion.tokens) for completion in completions)
