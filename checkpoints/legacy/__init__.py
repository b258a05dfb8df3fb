"""The legacy weight file: a pickled Flax tree, indexed and read without being unpickled."""

from checkpoints.legacy.pickle_file import LegacyPickle, index_pickle
from checkpoints.legacy.source import ENDINGS, LegacySource, config_folder, find_legacy, legacy_path
from checkpoints.legacy.symbols import LegacyPickleError, LegacyTensor
from checkpoints.legacy.tensors import open_legacy

__all__ = [
    "ENDINGS",
    "LegacyPickle",
    "LegacyPickleError",
    "LegacySource",
    "LegacyTensor",
    "config_folder",
    "find_legacy",
    "index_pickle",
    "legacy_path",
    "open_legacy",
]
