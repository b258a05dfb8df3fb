"""One of several hosts that restore a checkpoint together.

``python -m tests.checkpoints.restore_worker --checkpoint=... --mesh=...`` prints JSON: the bytes that this host read,
and a digest of every shard on its devices.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import jax
import numpy as np
from absl import flags

from launch.flags.model import define_model_flags, describe_loaded, load_engine, open_checkpoint, read_mesh
from launch.process.startup import define_device_flags, run_launcher, start_devices


def shard_digests(weights: Any) -> dict[str, str]:
    """Return the digest of each shard on this host's devices, by leaf and position."""
    found = {}
    for path, array in jax.tree_util.tree_leaves_with_path(weights):
        for shard in array.addressable_shards:
            place = [part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True)]
            data = np.asarray(shard.data)
            found[f"{jax.tree_util.keystr(path)} {place}"] = (
                hashlib.sha256(data.tobytes()).hexdigest() + f" {data.dtype}"
            )
    return found


def define_flags(values: flags.FlagValues) -> None:
    define_model_flags(values)
    define_device_flags(values)


def main(values: flags.FlagValues) -> None:
    folder, _ = open_checkpoint(values)
    start_devices(values)
    engine = load_engine(values, folder, read_mesh(values), rows=1)
    assert engine.loaded is not None
    found = {
        "read": engine.loaded.bytes_read,
        "held": engine.loaded.bytes_held,
        "stored": engine.loaded.bytes_stored,
        "said": describe_loaded(engine, engine.loaded),
        "shards": shard_digests(engine.weights),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
