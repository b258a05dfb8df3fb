"""The one base class of errors that are the caller's to fix."""

from __future__ import annotations


class InputError(ValueError):
    """What was asked for cannot be done; the message says what is wrong, where, and what would be right.

    Launchers print it as one paragraph and exit with code 2.

    Attributes:
      message: the sentence, without the detail.
      field: name of the parameter or the field of a request that is wrong, where it is one.
      detail: what a library said about it, which the text of the error repeats in brackets.
    """

    def __init__(self, message: str, *, field: str | None = None, detail: object = None) -> None:
        self.message, self.field = message, field
        self.detail = None if detail is None else str(detail)
        super().__init__(message if self.detail is None else f"{message} ({self.detail})")


class MeshError(InputError):
    """A mesh that cannot be parsed, does not match the devices, or does not divide the model."""
