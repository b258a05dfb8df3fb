"""The legacy weight file: a pickled Flax tree, indexed and read without being unpickled."""

from checkpoints.legacy.pickle_file import LegacyPickle, index_pickle
from checkpoints.legacy.symbols import LegacyPickleError, LegacyTensor
from checkpoints.legacy.tensors import open_legacy

__all__ = ["LegacyPickle", "LegacyPickleError", "LegacyTensor", "index_pickle", "open_legacy"]
