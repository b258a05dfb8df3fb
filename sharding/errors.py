"""Exceptions for errors that the caller can fix."""

from __future__ import annotations

from collections.abc import Sequence

# Why a row failed, for messages.
NON_FINITE = "the model computed logits that are NaN or infinite"
_SHOWN = 20


class InputError(ValueError):
    """Invalid input. The message says what is wrong, where, and what would be right.

    Commands print the message and exit with code 2.

    Attributes:
      message: the message, without the detail.
      field: name of the wrong parameter or request field, or None.
      detail: message of the library error that caused it, or None. ``str(error)`` appends it in parentheses.
    """

    def __init__(self, message: str, *, field: str | None = None, detail: object = None) -> None:
        self.message, self.field = message, field
        self.detail = None if detail is None else str(detail)
        super().__init__(message if self.detail is None else f"{message} ({self.detail})")


class MeshError(InputError):
    """A mesh or topology that cannot be parsed, does not match the devices, or cannot hold the model."""


class NonFiniteError(InputError):
    """The model's logits are NaN or infinite, so there is no result.

    Attributes:
      rows: indices of the rows whose logits are not finite.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = list(rows)
        shown = ", ".join(map(str, self.rows[:_SHOWN])) + (", ..." if len(self.rows) > _SHOWN else "")
        where = f"row {shown}" if len(self.rows) == 1 else f"rows {shown}"
        super().__init__(
            f"{NON_FINITE} in {where}. `diffumesh verify` names weights with such values; if there are none, "
            "values overflow in this dtype: use float32, without quantization"
        )


class OutOfMemoryError(MeshError):
    """The devices of a mesh have too little memory for a compiled program."""
