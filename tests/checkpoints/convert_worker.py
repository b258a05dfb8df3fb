"""Runs ``launch.convert`` as one of several hosts, of which the last one fails in the middle of its share.

``python -m tests.checkpoints.convert_worker --source=... --output=... --last_host=raise|die``
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import numpy as np
from absl import flags

from checkpoints.opening import open_tensors
from checkpoints.source import Index, StoredTensor, StoredTensors
from launch import convert
from launch.process.startup import run_launcher


def failing(tensor: StoredTensor, how: str) -> StoredTensor:
    def read(index: Index) -> np.ndarray:
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the lamp went out")

    return replace(tensor, read=read)


def main(values: flags.FlagValues) -> None:
    everyone, exact = convert.all_hosts(), convert.convert
    assert everyone.count > 1

    def failing_convert(source, layout, output, *, tensors, processes, **options):
        assert tensors is None
        if processes.index == processes.count - 1:
            found = open_tensors(source)
            # The last tensor in this process's share
            last = processes.share({name: found[name].bytes for name in found.by_name})[-1]
            tensors = StoredTensors(found.by_name | {last: [failing(found[last], values.last_host)]})
        exact(source, layout, output, tensors=tensors, processes=processes, **options)

    convert.convert = failing_convert
    convert.main(values)


def define_flags(values: flags.FlagValues) -> None:
    convert.define_flags(values)
    flags.DEFINE_enum("last_host", None, ("raise", "die"), "What becomes of the last host.", flag_values=values)


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__)
