"""Runs ``launch.batch`` and records which rows start.

``python -m tests.launch.batch_worker --begun=FILE ...`` appends the seed of each row to FILE, one per line, before the
row is inserted into a slot. ``--largest_file`` limits the size of files in bytes, to simulate a full disk.
"""

from __future__ import annotations

import resource
from pathlib import Path

from absl import flags

from launch import batch
from launch.process.startup import run_launcher
from runtime.execution.pool import Pool
from runtime.execution.step_plan import PoolOutcome, PoolPlan


def define_flags(values: flags.FlagValues) -> None:
    batch.define_flags(values)
    flags.DEFINE_string("begun", None, "File of what was begun.", flag_values=values)
    flags.DEFINE_integer("largest_file", None, "Bytes.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    if values.largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (values.largest_file, values.largest_file))
    execute = Pool.execute

    def noting(self: Pool, plan: PoolPlan) -> PoolOutcome:
        with Path(values.begun).open("a") as file:
            file.writelines(f"{one.request.seed}\n" for one in plan.insert)
        return execute(self, plan)

    Pool.execute = noting
    batch.main(values)


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
