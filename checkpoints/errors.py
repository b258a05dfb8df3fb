"""What can be wrong with a checkpoint."""

from sharding.errors import InputError


class CheckpointError(InputError):
    """A checkpoint that cannot be used; the subclasses say why where that can be told."""


class IncompleteCheckpointError(CheckpointError):
    """A checkpoint whose writing was not finished, or of which something is missing."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint whose data is not what was written; the message names the tensor or the file."""


class MismatchedCheckpointError(CheckpointError):
    """A checkpoint of another model, shape, dtype or format than wanted; the message says want and have."""


class OtherProcessError(CheckpointError):
    """Another process of the same work failed, and this one ends for it; the message says with what."""
