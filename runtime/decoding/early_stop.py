"""Whether rows stop early, and with which stop tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.decoding.kinds import ParameterError

MAX_STOP_TOKENS = 64


def decide_early_stop(
    early_stop: bool | None, stop_token_ids: Sequence[int], end_token_ids: Sequence[int], default: bool
) -> dict[str, Any]:
    """Decide whether rows stop early, and with which stop tokens.

    Args:
      early_stop: what the caller's configuration says; None leaves it to ``default``.
      stop_token_ids: the configuration's stop tokens.
      end_token_ids: tokens that end a completion of the model. They are added to the stop tokens if rows stop early.
      default: used if ``early_stop`` is None. Calls that generate text pass True; calls that reproduce the original
        algorithm pass False.

    Returns:
      The fields ``early_stop`` and ``stop_token_ids`` of the configuration to run.

    Raises:
      ParameterError: with the end tokens, there are more than :data:`MAX_STOP_TOKENS`.
    """
    ends = default if early_stop is None else early_stop
    stops = tuple(dict.fromkeys([*stop_token_ids, *(end_token_ids if ends else ())]))
    if len(stops) > MAX_STOP_TOKENS:
        raise ParameterError(
            "stop_token_ids",
            f"has {len(stops)} entries with the model's own end tokens; expected at most {MAX_STOP_TOKENS} in all",
        )
    return {"early_stop": ends, "stop_token_ids": stops}
