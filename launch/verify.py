"""Check every byte of a checkpoint against its manifest of digests.

  diffumesh verify --checkpoint=DIR                       any checkpoint that has a manifest
  diffumesh verify --checkpoint=FOLDER --write_manifest   write the manifest of a Hugging Face folder or of a checkpoint
                                                          that plain Orbax saved

Every tensor and every file is read. If all are intact, the command prints one line and exits with 0. Otherwise it names
the tensor or file that is damaged, missing or added, or the tensors that contain NaN or infinity, and exits with 2.
Documents (README.md, pictures) and hidden files are not covered; among the weights, only hidden files that macOS and
NFS leave are not (.DS_Store). A manifest of version 1 covers fewer files, which is reported; --write_manifest extends
it to all files. A folder that has a manifest is verified before a new one is written: after an intended change of a
Hugging Face folder, first delete its manifest, diffumesh.manifest.json.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from checkpoints import DEMO, uncovered_files, verify, write_manifest
from launch.folders.models import open_model
from launch.process.startup import progress_bar, run_launcher, say
from runtime import InputError


def define_flags(values: flags.FlagValues) -> None:
    """Define this command's flags."""
    flags.DEFINE_string(
        "checkpoint", str(DEMO), "Folder, URL or Hub name to verify. Default: the demo.", flag_values=values
    )
    flags.DEFINE_bool(
        "write_manifest",
        False,
        "Write the manifest of a Hugging Face or Orbax folder that has none, or extend one of an older version.",
        flag_values=values,
    )


def main(values: flags.FlagValues) -> None:
    """Run ``diffumesh verify``: check a checkpoint's bytes against its manifest, or write the manifest."""
    folder, layout = open_model(values.checkpoint, "checkpoint")
    # The demo's folder also holds the programs and tasks that made it; they change without the model.
    is_demo = Path(values.checkpoint) == DEMO
    if values.write_manifest:
        if folder.fetched or "://" in values.checkpoint:
            raise InputError(
                f"--checkpoint={values.checkpoint}: --write_manifest requires a folder on this machine, by its path"
            )
        with progress_bar("digesting", of_bytes=True) as progress:
            write_manifest(folder, layout, covers_folder=not is_demo, progress=progress)
    start = time.perf_counter()
    with progress_bar("verifying", of_bytes=True) as progress:
        count = verify(folder, progress=progress)
    if not is_demo and (uncovered := uncovered_files(folder)):
        say(
            f"the manifest has an older version and does not cover {len(uncovered)} files: "
            f"{', '.join(uncovered):.300}; --write_manifest extends it"
        )
    seconds = time.perf_counter() - start
    print(f"{folder.place}: {count:,} bytes of weights intact ({count / seconds / 1e9:.2f} GB/s)")


def run(argv: Sequence[str] | None = None) -> None:
    """Run ``diffumesh verify`` from the command line."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
