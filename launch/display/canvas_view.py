"""Convert canvases to the text and kind of each position, for the terminal and for the HTML page.

Dimension letters: B rows, S positions of the padded prompts, N new tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from absl import flags

from launch.display.history_html import HistoryRow, HistoryToken, write_history_html
from launch.display.watch import CanvasWatcher, TokenKind
from launch.process.destinations import check_writable
from launch.process.startup import Report, is_main_process, progress_bar
from runtime import (
    Completion,
    DiffusionConfig,
    Engine,
    GenerationResult,
    InputError,
    SamplingConfig,
    unpadded_rows,
)

# Title of the progress of a generation.
_PROGRESS = "compiling and decoding, steps"


class CanvasView:
    """Converts the canvases of one batch to text, position by position."""

    def __init__(
        self,
        engine: Engine,
        ids: np.ndarray,
        mask: np.ndarray,
        samples: int,
        suffixes: Sequence[Sequence[int]] = (),
    ) -> None:
        """Take the prompts, before their canvases are converted.

        Args:
          engine: the engine that generates the canvases.
          ids: token ids of the left-padded prompts, int32 ``[P, S]``.
          mask: their attention mask, ``[P, S]``.
          samples: number of rows that each prompt has in a canvas, so that B is P times ``samples``.
          suffixes: for each prompt, the tokens that follow its new tokens. Canvases do not contain them.
        """
        self._mask_id = engine.config.mask_token_id
        self._ends = frozenset(engine.end_token_ids)
        self._mask = mask
        self._variable_length = engine.config.family.variable_length
        # For each row, which tokens of its prompt are given and not masks.
        self._given = unpadded_rows(np.repeat(ids != self._mask_id, samples, axis=0), mask)
        tokenizer = engine.tokenizer
        self._text = functools.cache(lambda token: tokenizer.decode([token], skip_special_tokens=False))
        after = [[self._text(token) for token in suffix] for suffix in suffixes or [()] * len(ids)]
        self._after = [suffix for suffix in after for _ in range(samples)]

    def rows(self, canvas: np.ndarray) -> list[list[tuple[str, TokenKind]]]:
        """Return (text, kind) of every position of each row, without padding and with suffixes.

        Args:
          canvas: int32 ``[B, S + N]``.
        """
        found: list[list[tuple[str, TokenKind]]] = []
        for number, row in enumerate(unpadded_rows(canvas, self._mask)):
            kinds = self._kinds(number, row)
            found.append([(self._text(int(token)), kind) for token, kind in zip(row, kinds, strict=True)])
            found[-1] += [(text, "prompt") for text in self._after[number]]
        return found

    def history_rows(
        self, result: GenerationResult, titles: Sequence[str], completions: Sequence[Completion]
    ) -> list[HistoryRow]:
        """Convert a finished generation to the rows of :func:`launch.display.history_html.write_history_html`.

        A row that ended early, or has a variable length, has only the steps that it ran and the positions that it
        reached. Positions that were removed are not shown.
        """
        rows = []
        sequences, steps = unpadded_rows(result.sequences, self._mask), unpadded_rows(result.commit_steps, self._mask)
        for number, (tokens, title, completion) in enumerate(zip(sequences, titles, completions, strict=True)):
            kinds, width, commit_steps = self._kinds(number, tokens), len(self._given[number]), steps[number].tolist()
            # The text may end at a stop string in the middle of the tokens.
            cut = width + len(completion.tokens) if completion.finish_reason == "stop" else len(tokens)
            pieces, ended_early = [], self._variable_length
            for place, (token, kind, step) in enumerate(zip(tokens.tolist(), kinds, commit_steps, strict=True)):
                if place >= width and kind != "mask" and step < 0:
                    ended_early = True
                    continue
                end = kind == "end" or place >= cut
                pieces.append(HistoryToken(self._text(token), None if kind == "mask" else step, end=end))
            pieces += [HistoryToken(text, -1) for text in self._after[number]]
            rows.append(HistoryRow(title, pieces, max(1, max(commit_steps) + 1) if ended_early else result.stats.steps))
        return rows

    def _kinds(self, number: int, row: np.ndarray) -> list[TokenKind]:
        """Return the kind of every token of a row, which has no padding."""
        given = self._given[number]
        kinds: list[TokenKind] = []
        ended = False
        for position, token in enumerate(row.tolist()):
            ended = ended or (position >= len(given) and token in self._ends)
            if token == self._mask_id:
                kinds.append("mask")
            elif ended:
                kinds.append("end")
            else:
                kinds.append("prompt" if position < len(given) and given[position] else "generated")
        return kinds


@contextmanager
def watched(view: CanvasView, titles: Sequence[str]) -> Iterator[tuple[Report, Callable[[int, np.ndarray], None]]]:
    """Show the canvas on host 0's interactive terminal, elsewhere lines of progress, while the ``with`` block runs.

    Yields:
      Two functions: one is called with (steps done, all steps), the other with each step and its canvas, int32
      ``[B, S + N]``. All hosts call both, so that all run step by step.
    """
    with CanvasWatcher(1, titles=titles) as watcher, ExitStack() as stack:
        lines = None if watcher.active else stack.enter_context(progress_bar(_PROGRESS))

        def expect(done: int, steps: int) -> None:
            watcher.steps = steps
            if lines is not None:
                lines(done, steps)

        def show(step: int, canvas: np.ndarray) -> None:
            if watcher.active and is_main_process():
                watcher.update(step, view.rows(canvas))

        yield expect, show


@contextmanager
def observed(
    view: CanvasView, titles: Sequence[str], *, watch: bool
) -> Iterator[tuple[Report, Callable[[int, np.ndarray], None] | None]]:
    """Show the canvas as it unmasks if ``watch`` is set, else a progress bar, while the ``with`` block runs.

    Yields:
      The progress callback, and the callback for each step's canvas or None.
    """
    if watch:
        with watched(view, titles) as (progress, show):
            yield progress, show
    else:
        with progress_bar(_PROGRESS) as progress:
            yield progress, None


def row_titles(prompts: Sequence[str], samples: int) -> list[str]:
    """Return a heading for every row: the first line of its prompt, and the sample's number if there are several."""
    return [
        (prompt.strip().splitlines() or [""])[0][:80] + (f"  [{sample}]" if samples > 1 else "")
        for prompt in prompts
        for sample in range(samples)
    ]


def check_display(values: flags.FlagValues, model: str, config: DiffusionConfig | SamplingConfig) -> None:
    """Check that what the flags ask for can be shown.

    Raises:
      InputError: log-probabilities are not in JSON; or there is no history, because the model is autoregressive, or its
        page cannot be written.
    """
    if config.log_probabilities and not values.json:
        raise InputError("--log_probabilities requires --json", field="log_probabilities")
    if values.history_html is None:
        return
    if isinstance(config, SamplingConfig):
        raise InputError(f"--history_html requires a diffusion model; {model} is autoregressive")
    if is_main_process():
        check_writable("history_html", values.history_html)


def write_history(
    path: str | Path,
    view: CanvasView,
    result: GenerationResult,
    titles: Sequence[str],
    config: DiffusionConfig,
    completions: Sequence[Completion],
) -> None:
    """Write the page of ``--history_html``.

    Raises:
      OSError: the file cannot be written.
    """
    settings = {name: str(value) for name, value in dataclasses.asdict(config).items()}
    rows = view.history_rows(result, titles, completions)
    write_history_html(path, rows, title="diffumesh: how it was generated", settings=settings)
