"""``launch.batch`` that notes which rows it begins.

``python -m tests.launch.batch_worker --begun=FILE ...`` appends the seed of every row to FILE, a line each, before it
enters a slot. With ``--largest_file`` no file can grow beyond so many bytes, as on a disk that is full.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

from absl import flags

from launch import batch
from launch.startup import run_launcher
from runtime.execution.row_request import RowRequest
from runtime.execution.slots import Slots


def define_flags(values: flags.FlagValues) -> None:
    batch.define_flags(values)
    flags.DEFINE_string("begun", None, "File of what was begun.", flag_values=values)
    flags.DEFINE_integer("largest_file", None, "Bytes.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    if values.largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (values.largest_file, values.largest_file))
    enter = Slots.enter

    def noting(self: Slots, requests: Mapping[int, RowRequest]) -> None:
        with Path(values.begun).open("a") as file:
            file.writelines(f"{request.seed}\n" for request in requests.values())
        enter(self, requests)

    Slots.enter = noting
    batch.main(values)


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
