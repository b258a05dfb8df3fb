"""Errors of checkpoints."""

from sharding.errors import InputError


class CheckpointError(InputError):
    """A checkpoint cannot be used; the subclasses say why, if that is known."""


class IncompleteCheckpointError(CheckpointError):
    """A checkpoint was not written completely, or a part of it is missing."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint differs from what was written; the message names the tensor or the file."""


class MismatchedCheckpointError(CheckpointError):
    """A checkpoint has another model, shape, dtype or format than expected; the message says what it has instead."""


class OtherProcessError(CheckpointError):
    """Another process failed, so this one ends too; the message contains that process's error."""
