"""Hooks with which a caller changes tokens or logits between the steps of exact decoding, as in Dream's code.

Dimension letters: B batch, S the caller's prompt width, N new tokens, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from runtime.execution.caller_rows import CallerRows
from runtime.execution.left_padding import end_align, start_align
from runtime.execution.programs import lower_denoise_with_logits, put, shapes_of
from runtime.execution.runner import Runner
from runtime.execution.scoring import shifted_logits
from runtime.execution.slot_kinds import DiffusionSlots
from sharding.errors import InputError

# hook(step, canvas int32 [B, S + N], logits float32 [B, S + N, V] or None) -> new canvas, or None for no change.
# The first call is before any forward pass, with step None.
TokensHook = Callable[[int | None, np.ndarray, np.ndarray | None], np.ndarray | None]
# hook(step, canvas, shifted logits) -> new logits, or None for no change.
LogitsHook = Callable[[int, np.ndarray, np.ndarray], np.ndarray | None]


class HookedSteps:
    """Runs the denoise steps of rows in slots, and calls hooks between them."""

    def __init__(self, runner: Runner, rows: CallerRows, slots: DiffusionSlots, steps: int) -> None:
        """Create a run for rows that are in the first slots.

        Args:
          runner: the model on its mesh.
          rows: the caller's rows.
          slots: the slots that hold them.
          steps: total number of denoise steps.
        """
        self._runner, self._rows, self._slots, self._steps = runner, rows, slots, steps

    def run(
        self,
        tokens_hook: TokensHook | None,
        logits_hook: LogitsHook | None,
        history: bool,
        seen: Callable[[int], None] = lambda done: None,
    ) -> np.ndarray | None:
        """Run all steps.

        Args:
          tokens_hook: see :data:`TokensHook`.
          logits_hook: see :data:`LogitsHook`. In every step, even one that commits nothing, it costs a full forward
            pass and a transfer of float32 logits ``[B, S + N, V]`` to the host and back.
          history: whether to record the canvas after every step, as the hooks left it.
          seen: called with the number of steps done, at the start and after the hooks of each step.

        Returns:
          The history int32 ``[steps, B, S + N]``, or None if it is not recorded.
        """
        kept = []
        self._resume(0, None if tokens_hook is None else tokens_hook(None, self._canvas(), None))
        seen(0)
        for step in range(self._steps):
            logits = None if logits_hook is None else self._step_with_logits(step, logits_hook)
            if logits is None:
                self._slots.run(step_limit=step + 1)
            self._resume(step + 1, None if tokens_hook is None else tokens_hook(step, self._canvas(), logits))
            seen(step + 1)
            if history:
                kept.append(self._canvas())
        return np.stack(kept) if history else None

    def _canvas(self) -> np.ndarray:
        return self._rows.canvas(self._slots.canvas())

    def _resume(self, step: int, changed: np.ndarray | None) -> None:
        """Continue all rows at this step, with the canvases that a hook returned; None leaves them as they are."""
        slots, count = self._slots, len(self._rows.lengths)
        canvas = np.asarray(slots.whole()[1].canvas)
        if changed is not None:
            changed = _checked("tokens_hook", changed, self._rows.padding.shape)
            if changed.dtype.kind not in "iu":
                raise InputError(f"tokens_hook returned values of type {changed.dtype}; expected integers")
            # In the hook's own type, which may hold ids that a canvas would cut off.
            wide = start_align(changed, self._rows.lengths, canvas[:count].astype(changed.dtype))
            if wide.min() < 0 or wide.max() >= self._runner.layout.config.vocab_size:
                raise InputError("tokens_hook returned token ids outside the vocabulary")
            canvas = np.concatenate([wide.astype(canvas.dtype), canvas[count:]])
        slots.restart(canvas, step)

    def _step_with_logits(self, step: int, logits_hook: LogitsHook) -> np.ndarray:
        """Run one step with the logits from the hook, and return these logits, float32 ``[B, S + N, V]``."""
        slots, layout, rows = self._slots, self._runner.layout, self._rows
        request, state = slots.whole()
        own = shifted_logits(self._runner, np.asarray(state.canvas), np.asarray(request.lengths))
        count = len(rows.lengths)
        logits = end_align(own[:count], rows.lengths, np.zeros((*rows.padding.shape, own.shape[-1]), np.float32))
        changed = logits_hook(step, self._canvas(), logits)
        if changed is not None:
            logits = _checked("logits_hook", changed, logits.shape).astype(np.float32)
            own[:count] = start_align(logits, rows.lengths, own[:count])
        padding = layout.padded_vocab - own.shape[-1]
        padded = np.pad(own, ((0, 0), (0, 0), (0, padding)), constant_values=-np.inf)
        request = replace(slots.request, step_limit=put(np.int32(step + 1), layout.replicated))
        arguments = (request, slots.state, put(padded, layout.sharding("batch", "canvas", "vocab")))
        compiled = self._runner.programs.get(
            ("denoise_with_logits", slots.forward, slots.program, shapes_of(arguments)),
            lambda: lower_denoise_with_logits(slots.forward, slots.program, *arguments),
        )
        slots.state = compiled(*arguments)
        slots.forwards += 1
        return logits


def _checked(name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(value)
    if array.shape != shape:
        raise InputError(f"{name} returned {list(array.shape)}; expected {list(shape)}")
    return array
