"""Check every byte of a checkpoint against its manifest of digests.

  diffumesh verify --checkpoint=DIR                       canonical, or a Hugging Face folder with a manifest
  diffumesh verify --checkpoint=FOLDER --write_manifest   write the manifest of a Hugging Face folder

Names the tensor or the file that is damaged and exits with 2; prints one line and exits with 0 when all is intact.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from absl import flags

from checkpoints import verify, write_manifest
from launch.convert import open_model
from launch.startup import progress_bar, run_launcher
from runtime import InputError


def define_flags(values: flags.FlagValues) -> None:
    """Define this launcher's flags."""
    flags.DEFINE_string("checkpoint", None, "Checkpoint to verify.", flag_values=values)
    flags.DEFINE_bool(
        "write_manifest", False, "Take a Hugging Face folder as it is now and write its manifest.", flag_values=values
    )


def main(values: flags.FlagValues) -> None:
    """Run the launcher."""
    folder, layout = open_model(values.checkpoint, "checkpoint")
    start = time.perf_counter()
    if values.write_manifest:
        if "://" in values.checkpoint:
            raise InputError(f"--checkpoint={values.checkpoint}: --write_manifest goes with a folder on this machine")
        if folder.is_canonical:
            raise InputError(f"{folder.place}: a canonical checkpoint has the manifest it was converted with")
        with progress_bar("digesting", of_bytes=True) as progress:
            write_manifest(folder, layout, progress=progress)
    with progress_bar("verifying", of_bytes=True) as progress:
        count = verify(folder, progress=progress)
    seconds = time.perf_counter() - start
    print(f"{folder.place}: {count:,} bytes of weights intact ({count / seconds / 1e9:.2f} GB/s)")


def run(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
