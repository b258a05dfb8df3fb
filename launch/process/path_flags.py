"""Flags for paths of files and folders."""

from __future__ import annotations

import os

from absl import flags


class _PathParser(flags.ArgumentParser):
    """Replaces ``~`` with the home folder. Shells do so only at the start of a word, so not in ``--flag=~/x``."""

    def parse(self, argument: str) -> str:
        return os.path.expanduser(argument)

    def flag_type(self) -> str:
        return "path"


def define_path(name: str, text: str, values: flags.FlagValues) -> None:
    """Define a flag for a path, in which ``~`` is the home folder; None by default."""
    flags.DEFINE(_PathParser(), name, None, text, flag_values=values)


def define_paths(name: str, text: str, values: flags.FlagValues) -> None:
    """Define a flag for a path that may be repeated; see :func:`define_path`."""
    flags.DEFINE_multi(_PathParser(), flags.ArgumentSerializer(), name, [], text, flag_values=values)
